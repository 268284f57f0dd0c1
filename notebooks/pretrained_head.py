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
# # A head on a pretrained model
#
# A mixture's contexts are the state, projected to the width of the table, plus a
# correction that starts at zero. So a fresh mixture *is* the softmax it is put upon and
# can take the place of a trained model's head: nothing is lost at the start, and what
# it learns comes on top. Here a small model is trained, frozen, and given other heads.
#
# Needs `pip install "softbottle[train]"`; takes some seconds on a CPU.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax

import softbottle
from softbottle import drawing

# %% [markdown]
# ## A trained model
#
# In practice this is yours or someone else's: a trunk that turns words into states, an
# output table and a bias. Ours has states 32 wide, which a matrix takes to a table 8
# wide (`lowrank(8)`, a softmax behind a projection). It learns the language of
# `bottleneck.ipynb`, 64 words each with a random distribution over the next, so that
# the divergence from the truth can be computed exactly.

# %%
words, state_dim, dim, steps = 64, 32, 8, 800
rng = np.random.default_rng(0)
log_p_WV = jax.nn.log_softmax(np.float32(2 * rng.normal(size=(words, words))))
p_WV = jnp.exp(log_p_WV)
own = softbottle.lowrank(dim)


def normal(*shape):
    """A matrix that keeps the scale of what it is multiplied by."""
    return np.float32(rng.normal(size=shape) / shape[0] ** 0.5)


def states(trunk):
    """The state after each word: an embedding and two layers."""
    x_WD = jax.nn.gelu(trunk["embedding_WD"] @ trunk["first_DD"])
    return x_WD @ trunk["second_DD"]


def divergence(head, output, hidden_WD):
    """KL(P || Q) in nats, mean over the words."""
    return (p_WV * (log_p_WV - head.log_probs(*output, hidden_WD))).sum(axis=1).mean()


def fit(loss, params):
    """Adam with warm-up and decay, as one compiled loop: parameters and losses."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, steps // 8, steps)
    optimizer = optax.adam(schedule)

    def step(carry, _):
        value, grads = jax.value_and_grad(loss)(carry[0])
        updates, state = optimizer.update(grads, carry[1])
        return (optax.apply_updates(carry[0], updates), state), value

    start = params, optimizer.init(params)
    (params, _), losses = jax.jit(
        lambda start: jax.lax.scan(step, start, length=steps)
    )(start)
    return params, np.asarray(losses)


trunk = {
    "embedding_WD": np.float32(rng.normal(size=(words, state_dim))),
    "first_DD": normal(state_dim, state_dim),
    "second_DD": normal(state_dim, state_dim),
}
output = (
    {"project_DE": normal(state_dim, dim)},
    np.float32(rng.normal(size=(words, dim)) / 2),
    np.zeros(words, np.float32),
)
(trunk, output), losses = fit(
    lambda model: divergence(own, model[1], states(model[0])), (trunk, output)
)
print(f"KL to the truth: {losses[0]:.3f} nats at first, {losses[-1]:.3f} trained")

# %% [markdown]
# ## Other heads, started
#
# The trunk is frozen: it turns the words into states once. A new head gets the model's
# table and bias as they are, and the model's projection in the place of its own. Where
# states and table are equally wide there is no projection, and `head.init` is enough.
#
# Before any training every loss is that of the model, to the last digits of float32.
# `moc(1)` is a control: the correction, without anything mixed.

# %%
hidden_WD = states(trunk)
project, table_VE, bias_V = output
heads = {
    "control": softbottle.moc(1),
    "partition": softbottle.partition(4),
    "moc": softbottle.moc(4),
    "mos": softbottle.mos(4),
}
started = {
    name: head.init(jax.random.key(0), state_dim, dim) | project
    for name, head in heads.items()
}
score = jax.jit(divergence, static_argnums=0)
before = {"the model": float(score(own, output, hidden_WD))}
for name, head in heads.items():
    before[name] = float(score(head, (started[name], table_VE, bias_V), hidden_WD))
before

# %% [markdown]
# ## Trained
#
# Only the head's own parameters learn: the trunk, the table and the bias stay as they
# are. The learning rate warms up, or Adam's first steps would leave the good start.

# %%
curves = {}
for name, head in heads.items():
    _, curves[name] = fit(
        lambda params, head=head: divergence(
            head, (params, table_VE, bias_V), hidden_WD
        ),
        started[name],
    )
    learned = sum(leaf.size for leaf in started[name].values())
    print(f"{head!r:22} {learned:5,} parameters, {curves[name][-1]:.3f} nats")

# %%
figure = drawing.Figure()
axes = figure.subplots()
axes.axhline(before["the model"], color=drawing.GRAY, ls=":", label="the model")
for name, curve in curves.items():
    color = drawing.HEADS.get(name, drawing.GRAY)
    axes.plot(curve, color=color, label=f"{name}: {curve[-1]:.2f}")
axes.set(xlabel="step", ylabel="KL to the truth, nats", ylim=(0, None))
axes.set(title="Heads on a frozen model, from its own softmax down")
drawing.label(axes)
figure

# %% [markdown]
# The control and `moc` stay where they started: the table of a softmax 8 wide has given
# what it can, and no better context helps it. `mos` and `partition` are not held to its
# rank and go below, with the same table over the same frozen states.
#
# ## What it means for you
#
# - Put a head on a model that you have: `head.init`, the model's table and bias, and
#   its projection if there is one. The first loss must be the model's own; if it is
#   not, a table is transposed or a bias is missing.
# - This language is made of what a softmax cannot say. A real model's states bring
#   less of it: hold out text to judge, because a few thousand labels overfit soon
#   (`docs/howto/pretrained.md`).
# - Training the trunk along with the new head is the next step; a mixture that starts
#   as the softmax does not disturb it.
