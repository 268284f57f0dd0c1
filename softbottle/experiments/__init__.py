"""What trains several models to compare them, or knows the truth beside one."""
