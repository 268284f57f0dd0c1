"""The page of a report before there is anything on it: light, dark and narrow."""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; --ink: #1c1e21; --paper: #fdfdfc; --soft: #5f656d;
  --line: #dcdee2; --shade: #f3f4f5; --link: #0b5ea8; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e6e3; --paper: #17181b; --soft: #9aa0a8; --line: #33363b;
    --shade: #1f2125; --link: #86b9ea; }}
  img {{ filter: invert(.9) hue-rotate(180deg); }} }}
body {{ margin: 0 auto; max-width: 72rem; padding: 1rem 1.2rem 4rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.55 system-ui, sans-serif;
  overflow-wrap: anywhere; }}
a {{ color: var(--link); }}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin: .4rem 0 .6rem; }}
h2 {{ margin-top: 2.5rem; border-bottom: 1px solid var(--line); }}
p, figcaption, .header, .verdicts {{ max-width: 56rem; }}
figure {{ margin: 1.2rem 0; }}
.panels {{ display: grid; gap: .6rem 1.2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }}
.panels figure {{ margin: .6rem 0; min-width: 0; }}
img {{ display: block; width: 100%; height: auto; background: white;
  border-radius: .4rem; }}
figcaption, summary {{ color: var(--soft); }}
figcaption {{ font-size: .92rem; padding-top: .3rem; }}
.about {{ border-left: .2rem solid var(--line); padding-left: .8rem;
  color: var(--soft); }}
.header {{ padding-left: 1.1rem; margin: .4rem 0; font-size: .85rem;
  color: var(--soft); }}
.verdicts {{ padding-left: 1.1rem; margin: .8rem 0; }}
nav {{ display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .8rem 0;
  font-size: .92rem; }}
details, figure div, .scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; overflow-wrap: normal; }}
th, td {{ text-align: left; vertical-align: top; padding: .15rem .6rem .15rem 0;
  font-variant-numeric: tabular-nums; }}
th {{ font-weight: 500; color: var(--soft); }}
.cells {{ margin: .6rem 0; font-size: .9rem; }}
.cells th, .cells td {{ padding: .25rem 1rem .25rem 0; vertical-align: baseline;
  border-bottom: 1px solid var(--line); white-space: nowrap; }}
.cells td:last-child {{ white-space: normal; }}
.cells thead th {{ line-height: 1.25; font-size: .85rem; vertical-align: bottom;
  white-space: normal; }}
.cells tbody th {{ color: var(--ink); font-weight: 600; }}
@media (max-width: 44rem) {{
  .cards, .cards tbody, .cards tr, .cards th, .cards td {{ display: block; }}
  .cards thead {{ display: none; }}
  .cards tr {{ border-bottom: 1px solid var(--line); padding: .4rem 0; }}
  .cards th, .cards td {{ border: 0; padding: .1rem 0; white-space: normal;
    overflow-wrap: anywhere; }}
  .cards td {{ display: flex; gap: 1rem; justify-content: space-between;
    text-align: right; }}
  .cards td::before {{ content: attr(data-head); color: var(--soft); flex: none;
    max-width: 55%; text-align: left; }} }}
@media print {{ details:not([open]) {{ display: none; }} }}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""
