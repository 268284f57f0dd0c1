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
# # A head in your own model
#
# A small language model in plain jax, in which the output layer is one argument. It is
# trained with four heads, and then we look at what the loss of a mixture holds in
# memory, and what it does not.
#
# Needs `pip install "softbottle[train]"`; takes some seconds on a CPU.

# %%
import re
from collections import Counter
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import softbottle
from softbottle import drawing

# %% [markdown]
# ## A text
#
# Python comes with its own reference manual, the text behind `help()`: about a hundred
# thousand words and signs, on every machine. The 1,000 most frequent are the
# vocabulary; all others are id 0. Of a hundred blocks every tenth is held out.

# %%
vocab, dim = 1000, 16
text = re.findall(r"\w+|[^\w\s]", " ".join(topics.topics.values()).lower())
frequent = [word for word, _ in Counter(text).most_common(vocab - 1)]
number = {word: index for index, word in enumerate(frequent, 1)}
ids_N = np.array([number.get(word, 0) for word in text], np.int32)
blocks = np.array_split(ids_N, 100)
held_out_N = np.concatenate(blocks[9::10])
train_N = np.concatenate([block for at, block in enumerate(blocks) if at % 10 < 9])
print(f"{len(train_N):,} tokens to train on, {len(held_out_N):,} held out")
print(" ".join(text[2000:2030]))

# %% [markdown]
# ## The model
#
# The embeddings of the last four words, a hidden layer, and a state as wide as the
# embeddings: any network that ends in a state per position will do. The only lines that
# know of an output layer are `head.init` and `head.loss`. The table that embeds the
# words is the output table too.

# %%
context, hidden_dim = 4, 64


def init(head):
    """Parameters of the model: a tree of arrays, of which the head has a branch."""
    rng = np.random.default_rng(0)
    shapes = {
        "table_VE": (vocab, dim),
        "dense_ED": (context * dim, hidden_dim),
        "last_DE": (hidden_dim, dim),
    }
    params = {
        name: rng.normal(size=shape).astype(np.float32) * shape[-2] ** -0.5
        for name, shape in shapes.items()
    }
    params["table_VE"] = rng.normal(size=(vocab, dim)).astype(np.float32) / 4
    params["bias_V"] = np.zeros(vocab, np.float32)
    params["head"] = head.init(jax.random.key(0), dim, dim)
    return params


def states(params, inputs_TC):
    """The state from which the word after some words is predicted."""
    x_TE = params["table_VE"][inputs_TC].reshape(len(inputs_TC), -1)
    return jax.nn.gelu(x_TE @ params["dense_ED"]) @ params["last_DE"]


def mean_loss(params, head, inputs_TC, labels_T):
    """Nats per token."""
    output = (params["head"], params["table_VE"], params["bias_V"])
    return head.loss(*output, states(params, inputs_TC), labels_T) / len(labels_T)


# %% [markdown]
# ## Four heads
#
# The swap is the argument. All see the same batches and share one learning rate; a
# mixture starts as the softmax that it replaces.

# %%
heads = {
    "softmax": softbottle.softmax(),
    "partition": softbottle.partition(4),
    "moc": softbottle.moc(4),
    "mos": softbottle.mos(4),
}
steps = 200


def batches(ids_N, count, tokens=256):
    """Random positions of a text: the words before, and the word itself."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        at_T = rng.integers(context, len(ids_N), tokens)
        yield ids_N[at_T[:, None] - np.arange(context, 0, -1)], ids_N[at_T]


def train(head):
    """Losses on the way, and on the held-out text at the end."""
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    @jax.jit
    def step(params, state, *batch):
        loss, grads = jax.value_and_grad(mean_loss)(params, head, *batch)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    params = init(head)
    state, losses = optimizer.init(params), []
    for batch in batches(train_N, steps):
        params, state, loss = step(params, state, *batch)
        losses.append(loss)
    # The loss is that before the update, which is not taken here.
    scores = [step(params, state, *batch)[2] for batch in batches(held_out_N, 16)]
    return np.array(losses), float(np.mean(scores))


losses, held_out = {}, {}
for name, head in heads.items():
    losses[name], held_out[name] = train(head)
    size = sum(leaf.size for leaf in jax.tree.leaves(init(head)))
    print(f"{head!r:22} {size:,} parameters, {held_out[name]:.3f} nats held out")

# %%
figure = drawing.Figure()
axes = figure.subplots()
for name, curve in losses.items():
    smooth = np.convolve(curve, np.ones(20) / 20, "valid")
    label = f"{name}: {held_out[name]:.3f} held out"
    axes.plot(np.arange(19, steps), smooth, color=drawing.HEADS[name], label=label)
axes.set(xlabel="step", ylabel="training loss, mean of 20 steps, nats")
drawing.label(axes)
figure

# %% [markdown]
# A swap is easy. On so small a text and model it gains next to nothing: one seed and a
# difference in the second decimal are an example, not a comparison. There is one in
# `docs/results/frontier.md`, and `launch/frontier.py` makes one on your own text.
#
# ## What is not in memory
#
# A mixture of K softmaxes has K logits for each token and word. Written out as below,
# the [T, K, V] array and its gradient are held at once. The head's `loss` computes the
# same number in blocks and holds a few of these. For 2,048 tokens, K = 4 and 32,000
# words the compiler tells what each program needs, without running it.


# %%
def written_out(params, table_VE, hidden_TD, labels_T):
    """The mixture's loss as its formula stands."""
    log_prior_TK, context_TKE = softbottle.mos(4).mix(params, hidden_TD)
    logits_TKV = jnp.einsum("tke,ve->tkv", context_TKE, table_VE)
    log_p_TKV = jax.nn.log_softmax(logits_TKV)
    log_p_TK = jnp.take_along_axis(log_p_TKV, labels_T[:, None, None], 2)[..., 0]
    return -jax.nn.logsumexp(log_prior_TK + log_p_TK, axis=1).sum()


def fused(params, table_VE, hidden_TD, labels_T):
    """The same by the head."""
    return softbottle.mos(4).loss(params, table_VE, None, hidden_TD, labels_T)


def problem(tokens, words):
    """Parameters, table, states and labels of that size."""
    rng = np.random.default_rng(0)
    table_VE = rng.normal(size=(words, dim)).astype(np.float32) / 4
    hidden_TD = rng.normal(size=(tokens, dim)).astype(np.float32)
    labels_T = rng.integers(words, size=tokens)
    params = softbottle.mos(4).init(jax.random.key(0), dim, dim)
    return params, table_VE, hidden_TD, labels_T


gradients = {
    name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    for name, loss in (("written out", written_out), ("softbottle", fused))
}
small, large = problem(64, 500), problem(2048, 32_000)
memory = {}
for name, gradient in gradients.items():
    needed = gradient.lower(*large).compile().memory_analysis()
    memory[name] = needed.temp_size_in_bytes / 2**20
    print(
        f"{name:12} loss {gradient(*small)[0]:.4f}, {memory[name]:7,.0f} MiB when large"
    )

# %% [markdown]
# ## What it means for you
#
# - A head goes into a model in a line or two; flax has ready modules, and equinox needs
#   four lines (`docs/howto`).
# - A mixture needs no more memory than a softmax: a few blocks of logits, whose size is
#   `softbottle.Options(budget_bytes=...)`.
# - `partition` and `moc` cost the time of one softmax, `mos(K)` that of K.
#
# Next: `pretrained.ipynb` looks into a model that is already trained.
