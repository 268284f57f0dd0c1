import doctest
import functools

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import softbottle
from softbottle import modules

pytestmark = pytest.mark.usefixtures("quick_keys")
VOCAB, HIDDEN, WIDTH = 11, 7, 5
HEADS = {"mos": softbottle.mos(3), "plif": softbottle.plif(13, components=2)}


def make_inputs():
    rng = np.random.default_rng(2)
    hidden = rng.normal(size=(2, 3, HIDDEN)).astype(np.float32)
    labels = rng.integers(0, VOCAB, (2, 3))
    weights = np.array([[1.0, 0.0, 2.0], [0.5, 1.0, 0.0]], np.float32)
    return hidden, labels, weights


def make_linen(head, **fields):
    module = modules.LinenHead(head, VOCAB, WIDTH, **fields)
    hidden, labels, _ = make_inputs()
    variables = jax.jit(module.init)(jax.random.key(0), hidden, labels)
    params = variables["params"]
    arguments = (params["head"], params["table_VE"], params.get("bias_V"))

    @jax.jit
    def apply(variables, calls):
        return {
            call: module.apply(variables, *arguments, method=call.split()[0])
            for call, arguments in calls.items()
        }

    return functools.partial(apply, variables), arguments


def make_nnx(head, **fields):
    module = modules.NnxHead(
        head, HIDDEN, vocab=VOCAB, context_dim=WIDTH, rngs=nnx.Rngs(0), **fields
    )
    values = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    arguments = (values["params"], values["table_VE"], values.get("bias_V"))

    @nnx.jit
    def apply(module, calls):
        return {
            call: getattr(module, call.split()[0])(*arguments)
            for call, arguments in calls.items()
        }

    return functools.partial(apply, module), arguments


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
    run, arguments = MAKERS[kind](HEADS[head], bias=bias)
    assert (arguments[2] is None) == (not bias)
    hidden, labels, weights = make_inputs()
    head, key = HEADS[head], jax.random.key(1)

    @jax.jit
    def expected(*flat):
        return (
            head.nll(*flat, labels.ravel()).reshape(2, 3),
            head.log_probs(*flat).reshape(2, 3, VOCAB),
            head.sample(*flat, key).reshape(2, 3),
        )

    nll, log_p, ids = expected(*arguments, hidden.reshape(-1, HIDDEN))
    ours = run(
        {
            "__call__": (hidden, labels, weights),
            "__call__ unweighted": (hidden, labels),
            "nll": (hidden, labels),
            "log_probs": (hidden,),
            "sample": (hidden, key),
        }
    )
    np.testing.assert_allclose(ours["__call__"], np.sum(weights * nll), rtol=1e-6)
    np.testing.assert_allclose(ours["nll"], nll, rtol=1e-6)
    np.testing.assert_allclose(ours["log_probs"], log_p, rtol=1e-6)
    np.testing.assert_array_equal(ours["sample"], ids)
    np.testing.assert_allclose(ours["__call__ unweighted"], np.sum(nll), rtol=1e-5)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_the_bias_starts_where_it_is_said_to(kind):
    bias_V = softbottle.log_frequencies(np.arange(VOCAB))
    start = jax.nn.initializers.constant(bias_V)
    _, (*_, begun_V) = MAKERS[kind](HEADS["mos"], bias_init=start)
    np.testing.assert_array_equal(begun_V, bias_V)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_what_is_drawn_from_is_passed_on(kind):
    hidden, labels, _ = make_inputs()
    key, head = jax.random.key(1), HEADS["mos"]
    if kind == "linen":
        module = modules.LinenHead(head, VOCAB, WIDTH)
        variables = jax.jit(module.init)(key, hidden, labels)
        bound, state = module.bind, variables
    else:
        sizes = {"vocab": VOCAB, "context_dim": WIDTH}
        module = modules.NnxHead(head, HIDDEN, **sizes, rngs=nnx.Rngs(0))
        graph, state = nnx.split(module)
        bound = functools.partial(nnx.merge, graph)
    choices = [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]

    @jax.jit
    def run(state):
        module = bound(state)
        draws = [module.sample(hidden, key, **choice) for choice in choices]
        return module.log_probs(hidden), draws

    log_p, draws = run(state)
    for choice, drawn in zip(choices, draws, strict=True):
        np.testing.assert_array_equal(drawn, np.argmax(log_p, axis=-1), str(choice))


def test_the_gradient_of_a_linen_module_is_finite_and_reaches_everything():
    module = modules.LinenHead(softbottle.moss(3), VOCAB, WIDTH)
    inputs = make_inputs()
    variables = jax.jit(module.init)(jax.random.key(0), *inputs)
    grads = jax.jit(jax.grad(lambda v: module.apply(v, *inputs)))(variables)
    chex.assert_tree_all_finite(grads)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))


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
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("kind", MAKERS)
def test_options_reach_the_operation(kind):
    options = softbottle.Options(vocab=VOCAB + 1)
    hidden, labels, _ = make_inputs()
    with pytest.raises(ValueError, match=f"vocab={VOCAB + 1} exceeds"):
        run, _ = MAKERS[kind](HEADS["mos"], options=options)
        run({"__call__": (hidden, labels)})


@pytest.mark.parametrize("kind", MAKERS)
def test_shapes_that_do_not_go_together_are_refused(kind):
    hidden, labels, weights = make_inputs()
    run, _ = MAKERS[kind](HEADS["mos"])
    with pytest.raises(ValueError, match=r"labels must have the shape \(2, 3\)"):
        run({"nll": (hidden, labels.T)})
    with pytest.raises(ValueError, match=r"weights must .* got \(3, 2\)"):
        run({"__call__": (hidden, labels, weights.T)})


def test_options_of_a_call_go_before_the_module_s():
    hidden, labels, _ = make_inputs()
    module = modules.NnxHead(
        softbottle.mos(2), HIDDEN, vocab=VOCAB, context_dim=WIDTH, rngs=nnx.Rngs(0)
    )
    labels = labels % 7
    fewer = module.nll(hidden, labels, options=softbottle.Options(vocab=7))
    assert np.all(fewer < module.nll(hidden, labels))


def test_terms_of_the_loss_are_handed_on():
    head = softbottle.softmax()
    module = modules.NnxHead(
        head, WIDTH, vocab=VOCAB, context_dim=WIDTH, rngs=nnx.Rngs(0)
    )
    hidden, labels, weights = make_inputs()
    hidden = hidden[..., :WIDTH]
    flat = (hidden.reshape(6, WIDTH), labels.reshape(6))
    terms = {"label_smoothing": 0.2, "ignore_label": 3}

    @nnx.jit
    def run(module):
        output = ({}, module.table_VE[...], module.bias_V[...])
        ours = module(hidden, labels, weights, **terms)
        nll = module.nll(hidden, labels, **terms)
        loss = head.loss(*output, *flat, weights.reshape(6), **terms)
        return (ours, nll.reshape(6)), (loss, head.nll(*output, *flat, **terms))

    for ours, theirs in zip(*run(module), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    with pytest.raises(ValueError, match="reduction='none' is `nll`"):
        module(hidden, labels, reduction="none")
