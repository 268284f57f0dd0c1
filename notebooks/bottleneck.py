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
# # The bottleneck, seen
#
# A language model of width *d* ends in a softmax: the log-probability of word *v* after
# context *w* is h(w) · t(v) + b(v) minus a normalizer. Written as a matrix over all
# contexts and words, that has rank *d* + 2 at most, whatever the model below has
# learned. Here is a language whose log-probabilities have a higher rank, and what a
# softmax and a mixture of softmaxes (MoS) make of it.
#
# Needs `pip install "softbottle[train]"`; takes some seconds on a CPU.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import softbottle
from softbottle import drawing

words, width = 64, 8

# %% [markdown]
# ## A language that is known
#
# Each of 64 words has a distribution of its own over the word that follows, with logits
# drawn at random. So log P is a 64 x 64 matrix of rank 64. It is no mixture either: no
# head below is handed its own family.

# %%
rng = np.random.default_rng(0)
logits_WV = jnp.asarray(2 * rng.normal(size=(words, words)), jnp.float32)
log_p_WV = jax.nn.log_softmax(logits_WV)
p_WV = jnp.exp(log_p_WV)
entropy = -(p_WV * log_p_WV).sum(axis=1).mean()
print(f"rank {np.linalg.matrix_rank(log_p_WV)}, {entropy:.3f} nats per word")

# %% [markdown]
# ## Heads that learn it
#
# Every head gets the best states there can be: a free vector per word in place of a
# network, so that the output layer alone limits it. The loss is the exact divergence
# from the truth, without samples or minibatches.
#
# - `softmax`: one softmax, 8 wide.
# - `moc`: a mixture of 4 *contexts*, averaged before one softmax. It has the mixture's
#   parameters and the softmax's rank.
# - `mos`: a mixture of 4 softmaxes over the same table, reading the same states.
# - The last one is the fair rival: a softmax so wide that it has as many parameters as
#   the mixture.

# %%
heads = {
    "softmax": (softbottle.softmax(), width),
    "moc": (softbottle.moc(4), width),
    "mos": (softbottle.mos(4), width),
}


def init(head, dim):
    """States and table, both `dim` wide, with what the head adds to them."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "head": head.init(keys[0], dim, dim),
        "states": jax.random.normal(keys[1], (words, dim)),
        "table": jax.random.normal(keys[2], (words, dim)) / 2,
        "bias": jnp.zeros(words),
    }


def size(head, dim):
    """How many numbers are learned."""
    return sum(leaf.size for leaf in jax.tree.leaves(init(head, dim)))


wider = range(width, words)
many = size(*heads["mos"])
equal = next(dim for dim in wider if size(softbottle.softmax(), dim) >= many)
heads["wide softmax"] = (softbottle.softmax(), equal)
for name, (head, dim) in heads.items():
    print(f"{name:12}  d = {dim:2}  {size(head, dim):,} parameters")


# %%
def log_probs(head, params):
    """Log Q(v | w) of every word v after every word w."""
    output = (params["head"], params["table"], params["bias"])
    return head.log_probs(*output, params["states"])


def divergence(head, params):
    """KL(P || Q) in nats, mean over the words w."""
    return (p_WV * (log_p_WV - log_probs(head, params))).sum(axis=1).mean()


def adam(params, grads, state, step, rate):
    """One step of Adam, written out: there is no optimizer to install."""
    state = (
        jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[0], grads),
        jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, state[1], grads),
    )
    ratio = rate * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    move = jax.tree.map(lambda m, s: ratio * m / (jnp.sqrt(s) + 1e-8), *state)
    return jax.tree.map(jnp.subtract, params, move), state


def fit(head, dim, steps=500, rate=0.1):
    """A whole training as one compiled loop, with a cosine decay of the rate."""

    def step(carry, at):
        kl, grads = jax.value_and_grad(lambda p: divergence(head, p))(carry[0])
        decayed = rate * (1 + jnp.cos(jnp.pi * at / steps)) / 2
        return adam(carry[0], grads, carry[1], at + 1, decayed), kl

    params = init(head, dim)
    zeros = jax.tree.map(jnp.zeros_like, params)
    scan = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps)))
    (params, _), kls = scan((params, (zeros, zeros)))
    return np.asarray(log_probs(head, params)), np.asarray(kls)


learned, curves = {}, {}
for name, (head, dim) in heads.items():
    learned[name], curves[name] = fit(head, dim)
kl = {name: float(curve[-1]) for name, curve in curves.items()}
kl

# %% [markdown]
# The mixture is closest to the truth, and not because of its parameters: the average of
# contexts has as many and gains nothing over the plain softmax, and the wide softmax
# has a few more and stays behind.

# %%
figure = drawing.Figure()
axes = figure.subplots()
for name, curve in curves.items():
    color = drawing.HEADS.get(name, drawing.GRAY)
    axes.plot(curve, color=color, label=f"{name}: {curve[-1]:.2f}")
axes.set(xlabel="step", ylabel="KL to the truth, nats", yscale="log")
axes.set(title="What a head can learn, given the best states")
drawing.label(axes)
figure


# %% [markdown]
# ## The rank, and its cliff
#
# Singular values of log Q tell the rank: those below the dotted line are rounding,
# since the entries are float32. A softmax falls off a cliff after *d* + 2 of them. The
# mixture's go on like the truth's.


# %%
def spectrum(matrix):
    """Singular values over the largest, and the tolerance of float32 entries."""
    sigma = np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)
    tolerance = 0.5 * np.sqrt(sum(matrix.shape) + 1) * np.finfo(np.float32).eps
    return sigma / sigma[0], tolerance


figure = drawing.Figure()
axes = figure.subplots()
ranks = {}
for name, matrix in {"truth": log_p_WV, **learned}.items():
    sigma, tolerance = spectrum(matrix)
    ranks[name] = int((sigma > tolerance).sum())
    color = drawing.VERMILION if name == "truth" else drawing.HEADS.get(name)
    label = f"{name}: rank {ranks[name]}"
    index = np.arange(1, words + 1)
    axes.semilogy(index, sigma, color=color or drawing.GRAY, label=label)
axes.axhline(tolerance, color=drawing.GRAY, linestyle=":")
axes.axvline(width + 2, color=drawing.GRAY, linestyle=":")
axes.set(xlabel="index", ylabel="singular value over the largest", ylim=(1e-11, 2))
axes.set(title="Singular values of log Q; the softmax bound d + 2 is dotted")
drawing.label(axes)
figure

# %% [markdown]
# ## One word
#
# The word after which the softmax is farthest from the truth, with its twelve most
# probable followers.

# %%
gap_W = (p_WV * (log_p_WV - learned["softmax"])).sum(axis=1)
word = int(jnp.argmax(gap_W))
best = np.argsort(-p_WV[word])[:12]
figure = drawing.Figure(figsize=(8, 3.5))
axes = figure.subplots()
bars = {"truth": np.asarray(log_p_WV)} | {n: learned[n] for n in ("softmax", "mos")}
colors = (drawing.VERMILION, drawing.BLACK, drawing.BLUE)
for at, (name, matrix) in enumerate(bars.items()):
    place = np.arange(len(best)) + 0.27 * (at - 1)
    axes.bar(place, np.exp(matrix[word, best]), 0.25, color=colors[at], label=name)
axes.set_xticks(range(len(best)), [f"w{index}" for index in best])
axes.set(ylabel="probability", title=f"What follows the word w{word}")
drawing.label(axes)
figure

# %% [markdown]
# ## What it means for you
#
# - The bound is a fact about matrices, and training longer does not lift it.
# - Real models are hundreds wide and real text is no random matrix, so the gap is
#   smaller there: `docs/results/frontier.md` measures heads on 28 million words, at
#   equal time and with fewer parameters.
# - The rate of 0.1 was the better of 0.03 and 0.1 for softmax and mixture alike; one
#   seed. With more words the picture stays and takes longer to draw.
#
# Next: `model.ipynb` puts a head into a model of your own.
