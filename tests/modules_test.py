import doctest

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import softbottle
from softbottle import modules

VOCAB, HIDDEN, WIDTH = 11, 7, 5
HEADS = {"mos": softbottle.mos(3), "plif": softbottle.plif(13, components=2)}


def make_inputs():
    hidden = jax.random.normal(jax.random.key(2), (2, 3, HIDDEN))
    labels = jax.random.randint(jax.random.key(3), (2, 3), 0, VOCAB)
    weights = jnp.array([[1.0, 0.0, 2.0], [0.5, 1.0, 0.0]])
    return hidden, labels, weights


def make_linen(head, **fields):
    module = modules.LinenHead(head, VOCAB, WIDTH, **fields)
    hidden, labels, _ = make_inputs()
    variables = jax.jit(module.init)(jax.random.key(0), hidden, labels)
    params = variables["params"]
    arguments = (params["head"], params["table_VE"], params.get("bias_V"))

    def call(*arguments, method=None):
        return jax.jit(module.apply, static_argnames="method")(
            variables, *arguments, method=method
        )

    return call, arguments


def make_nnx(head, **fields):
    module = modules.NnxHead(
        head, HIDDEN, vocab=VOCAB, context_dim=WIDTH, rngs=nnx.Rngs(0), **fields
    )
    values = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    arguments = (values["params"], values["table_VE"], values.get("bias_V"))

    def call(*arguments, method="__call__"):
        return nnx.jit(lambda module: getattr(module, method)(*arguments))(module)

    return call, arguments


MAKERS = {"linen": make_linen, "nnx": make_nnx}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_examples_of_the_docstrings_run():
    results = doctest.testmod(modules, extraglobs={"softbottle": softbottle})
    assert results.attempted >= 9 and results.failed == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, head, bias", [("linen", "mos", True), ("nnx", "plif", False)]
)
def test_a_module_says_what_its_head_says(kind, head, bias):
    call, arguments = MAKERS[kind](HEADS[head], bias=bias)
    assert (arguments[2] is None) == (not bias)
    hidden, labels, weights = make_inputs()
    flat = (*arguments, hidden.reshape(-1, HIDDEN))
    head = HEADS[head]
    expected = jax.jit(head.loss)(*flat, labels.reshape(-1), weights.reshape(-1))
    np.testing.assert_allclose(call(hidden, labels, weights), expected, rtol=1e-6)
    nll = jax.jit(head.nll)(*flat, labels.reshape(-1))
    np.testing.assert_allclose(
        call(hidden, labels, method="nll"), nll.reshape(2, 3), rtol=1e-6
    )
    np.testing.assert_allclose(call(hidden, labels), nll.sum(), rtol=1e-5)
    log_p = call(hidden, method="log_probs")
    assert log_p.shape == (2, 3, VOCAB)
    np.testing.assert_allclose(
        log_p.reshape(6, VOCAB), jax.jit(head.log_probs)(*flat), rtol=1e-6
    )
    ids = call(hidden, jax.random.key(1), method="sample")
    expected = jax.jit(head.sample)(*flat, jax.random.key(1)).reshape(2, 3)
    np.testing.assert_array_equal(ids, expected)


def test_the_gradient_of_a_linen_module_is_finite_and_reaches_everything():
    module = modules.LinenHead(softbottle.moss(3), VOCAB, WIDTH)
    inputs = make_inputs()
    variables = jax.jit(module.init)(jax.random.key(0), *inputs)
    grads = jax.jit(jax.grad(lambda v: module.apply(v, *inputs)))(variables)
    chex.assert_tree_all_finite(grads)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(grads))


@pytest.mark.slow
def test_the_gradient_of_an_nnx_module_is_finite_and_reaches_everything():
    module = modules.NnxHead(
        softbottle.moss(3), HIDDEN, vocab=VOCAB, context_dim=WIDTH, rngs=nnx.Rngs(0)
    )
    inputs = make_inputs()
    gradient = nnx.jit(nnx.grad(lambda module: module(*inputs)))
    grads = nnx.to_pure_dict(gradient(module))
    assert set(grads) == {"table_VE", "bias_V", "params"}
    chex.assert_tree_all_finite(grads)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("kind", MAKERS)
def test_options_reach_the_operation(kind):
    options = softbottle.Options(vocab=VOCAB + 1)
    hidden, labels, _ = make_inputs()
    with pytest.raises(ValueError, match=f"vocab={VOCAB + 1} exceeds"):
        call, _ = MAKERS[kind](HEADS["mos"], options=options)
        call(hidden, labels)
