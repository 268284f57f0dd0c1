import jax
import pytest

from softbottle import config as config_lib
from softbottle import heads, variants
from softbottle import model as models
from tests import tiny

VOCAB = 11


def with_settings(head, **settings):
    """A window model under a head whose table is 5 wide and whose state 7."""
    fields = {f"head__{name}": value for name, value in settings.items()}
    widths = {"model__embed_dim": 5, "model__hidden_dim": 8, "model__last_dim": 7}
    fields |= {"head__name": head, "model__backbone": "window", **widths}
    return tiny.change(config_lib.Config(), **fields)


def test_the_equal_softmax_is_the_widest_that_has_no_more_parameters():
    config = with_settings("mos", components=2)
    config.model.tied, config.model.context_dim = False, 3
    config.train.equal_softmax = True

    def size(config):
        init = models.make(config, VOCAB).init
        return models.count_parameters(jax.eval_shape(init, jax.random.key(0)), VOCAB)

    rival = variants.equal_softmax(config, VOCAB, size(config))
    wider = variants.with_head(config, "softmax", rival.model.context_dim + 1)
    assert (rival.head.name, rival.head.components) == ("softmax", None)
    assert not rival.train.equal_softmax
    assert size(rival) <= size(config) < size(wider)


@pytest.mark.parametrize("name", ["moc", "softmax", "softcap"])
def test_another_head_has_the_settings_that_both_have(name):
    config = with_settings("plif", knots=13, components=2)
    variant = variants.with_head(config, name, 4)
    kept = "components" in heads.settings(name)
    assert variant.head.components == (2 if kept else None)
    assert variant.head.knots is None and variant.model.context_dim == 4
    assert variant.model.last_dim == (7 if kept else 4)


def test_a_head_without_components_is_not_penalized_for_their_use():
    config = with_settings("mos", components=2)
    config.regularise.balance = 0.1
    softmax = variants.equal_softmax(config, VOCAB, 200)
    assert softmax.regularise.balance == 0 and models.make(softmax, VOCAB)
    assert variants.with_head(config, "moc", 5).regularise.balance == 0.1


@pytest.mark.parametrize("name, setting", [("mos", "components"), ("gss", "center")])
def test_another_head_that_needs_a_setting_is_refused_without_it(name, setting):
    with pytest.raises(ValueError, match=f"head.{setting} must be set: {name} has no"):
        variants.with_head(with_settings("softmax"), name, 4)


def test_a_replaced_head_has_the_given_settings_alone():
    config = with_settings("plif", knots=13, components=2)
    config.head.implementation = "reference"
    variant = variants.replace_head(config, {"name": "mos", "components": 3})
    assert (variant.head.name, variant.head.components) == ("mos", 3)
    assert variant.head.knots is None and variant.head.implementation == "reference"
    assert config.head.name == "plif" and variant.model == config.model
