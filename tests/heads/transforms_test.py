"""Heads under jit, vmap over models, remat and shard_map."""

import functools
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import softbottle
from softbottle import Options
from tests import oracle
from tests.oracle import CASES

ROWS, WORDS = 40, 34  # over eight shards the last one holds nothing but padding


def make_problem(name):
    inputs = oracle.make_inputs(name, tokens=16, rows=ROWS)
    return inputs._replace(labels_T=inputs.labels_T % WORDS)


def exact_step(name, inputs):
    live = inputs._replace(
        table_VE=inputs.table_VE[:WORDS], bias_V=inputs.bias_V[:WORDS]
    )
    value = np.dot(inputs.weights_T, oracle.nll(name, live))
    params, table_VE, bias_V, hidden_TD = oracle.gradients(name, live, inputs.weights_T)
    pad = ROWS - WORDS
    table_VE = np.pad(table_VE, ((0, pad), (0, 0)))
    return value, (params, table_VE, np.pad(bias_V, (0, pad)), hidden_TD)


def total(head, what, args, options):
    if what == "loss":
        return head.loss(*args, options=options)
    if what == "nll":
        return jnp.sum(head.nll(*args[:5], options=options) * args[5])
    # Of two words, either of which may be the likelier one.
    words_TM = jnp.stack([args[4], (args[4] + 1) % WORDS], axis=1)
    log_p_TM = head.log_probs_of(*args[:4], words_TM, options=options)
    return -jnp.sum(log_p_TM[:, 0] * args[5])


# The log-probabilities of words have in them what the nll has. Those of Mixtape are
# among the splits that jax does not check: what they add to its loss is ordinary code.
SPLIT = [
    ("moss", "loss", (1, 8)),
    ("plif_mixed", "loss", (2, 4)),
    ("softmax", "nll", (8, 1)),
    ("partition", "loss", (4, 2)),
    ("mixtape", "loss", (2, 4)),
    ("moss", "log_probs_of", (2, 4)),
    ("partition", "log_probs_of", (4, 2)),
]


@pytest.mark.parametrize("what", ["loss", "nll"])
def test_a_gradient_outside_jit_is_a_program_forward_and_one_backward(what, caplog):
    # Operation by operation it was over a hundred, seconds of compilation.
    inputs = oracle.cast(make_problem("mos"), jnp.float32)
    weighed = functools.partial(total, CASES["mos"].head, what, options=Options())
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        jax.grad(lambda params: weighed((params, *inputs[1:])))(inputs.params)
    compiled = [message for message in caplog.messages if "XLA compil" in message]
    assert 1 <= len(compiled) <= 10, compiled


@pytest.mark.parametrize("split", ["table_VE", "hidden_TD"])
def test_an_explicit_mesh_is_refused_with_what_to_do_which_works(split):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    head, inputs = CASES["softmax"].head, make_problem("softmax")
    expected = np.dot(inputs.weights_T, oracle.nll("softmax", inputs))
    inputs = oracle.cast(inputs, jnp.float32)
    placed = jax.NamedSharding(mesh, P("model" if split == "table_VE" else "data"))
    inputs = inputs._replace(**{split: jax.device_put(getattr(inputs, split), placed)})
    with jax.set_mesh(mesh):
        message = rf"{split} is split over axes of an Explicit mesh, .*auto_axes\("
        with pytest.raises(ValueError, match=message):
            jax.jit(head.loss)(*inputs)
        wrapped = jax.sharding.auto_axes(head.loss, out_sharding=P())
        np.testing.assert_allclose(jax.jit(wrapped)(*inputs), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name, what, layout", SPLIT)
def test_a_split_over_data_and_vocabulary_equals_the_oracle(name, what, layout):
    mesh = jax.make_mesh(layout, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    head, inputs = CASES[name].head, make_problem(name)
    options = Options(vocab=WORDS, vocab_axis="model", budget_bytes=1_000)
    specs = (P(), P("model"), P("model"), P("data"), P("data"), P("data"))

    def local(*args):
        return jax.lax.psum(total(head, what, args, options), "data")

    def step(*args):
        return jax.value_and_grad(local, argnums=(0, 1, 2, 3))(*args)

    split = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), specs[:4]))
    value, bars = jax.jit(split)(*oracle.cast(inputs, jnp.float32))
    exact, exact_bars = exact_step(name, inputs)
    oracle.assert_close(value, exact, "float32")
    oracle.assert_close(bars, exact_bars, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, what, layout",
    [
        ("moss", "loss", (1, 8)),
        ("plif_mixed", "loss", (4, 2)),
        ("moss", "nll", (2, 4)),
        ("mixtape", "log_probs_of", (2, 4)),
    ],
)
def test_a_split_that_jax_does_not_check_equals_the_oracle(name, what, layout):
    mesh = jax.make_mesh(layout, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    head, inputs = CASES[name].head, make_problem(name)
    options = Options(vocab=WORDS, vocab_axis="model", budget_bytes=1_000)
    specs = (P(), P("model"), P("model"), P("data"), P("data"), P("data"))

    def local(*args):
        return jax.lax.psum(total(head, what, args, options), "data")

    split = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
    )
    step = jax.jit(jax.value_and_grad(split, argnums=(0, 1, 2, 3, 5)))
    value, bars = step(*oracle.cast(inputs, jnp.float32))
    exact, exact_bars = exact_step(name, inputs)
    nll_T = oracle.nll(
        name,
        inputs._replace(table_VE=inputs.table_VE[:WORDS], bias_V=inputs.bias_V[:WORDS]),
    )
    if what == "loss":
        nll_T = np.where(inputs.weights_T != 0, nll_T, 0.0)
    oracle.assert_close(value, exact, "float32")
    oracle.assert_close(bars, (*exact_bars, nll_T), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moss", "mixtape"])
def test_an_unchecked_gradient_inside_a_split_is_that_of_the_dense_form(name):
    """jax sums cotangents there that it takes for different: so does the loss."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    inputs = oracle.cast(make_problem(name), jnp.float32)
    specs = (P(), P("model"), P("model"), P("data"), P("data"), P("data"))

    def gradients(implementation):
        options = Options(
            vocab=WORDS, vocab_axis="model", implementation=implementation
        )
        loss = functools.partial(CASES[name].head.loss, options=options)
        step = jax.shard_map(
            jax.grad(loss, argnums=(1, 2, 3, 5)),
            mesh=mesh,
            in_specs=specs,
            out_specs=(P("model"), P("model"), P("data"), P("data")),
            check_vma=False,
        )
        return jax.jit(step)(*inputs)

    oracle.assert_close(gradients("blocked"), gradients("reference"), "float32")


def test_split_log_probs_are_those_of_the_local_words():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    inputs = make_problem("mos")
    log_probs = functools.partial(
        CASES["mos"].head.log_probs,
        options=Options(vocab=WORDS, vocab_axis="model"),
    )
    split = jax.shard_map(
        log_probs,
        mesh=mesh,
        in_specs=(P(), P("model"), P("model"), P("data")),
        out_specs=P("data", "model"),
    )
    log_p_TV = np.asarray(jax.jit(split)(*oracle.cast(inputs[:4], jnp.float32)))
    exact_TV = oracle.log_probs(
        "mos",
        inputs.params,
        inputs.table_VE[:WORDS],
        inputs.bias_V[:WORDS],
        inputs.hidden_TD,
    )
    oracle.assert_close(log_p_TV[:, :WORDS], exact_TV, "float32")
    assert np.all(np.isneginf(log_p_TV[:, WORDS:]))


EXACT = {}
OF_THE_BEST = {"temperature": 1.3, "top_k": 9, "top_p": 0.8}
OF_ALL = {"top_p": 0.85, "min_p": 0.02}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout, checked, choices",
    [
        ("softmax", (1, 8), True, [OF_THE_BEST]),
        ("moss", (2, 4), True, [OF_ALL]),
        ("plif_mixed", (1, 8), False, [EXACT]),
        ("partition_mixed", (2, 4), False, [OF_THE_BEST]),
        # Two pieces of words, each of which is one block.
        ("mixtape", (2, 4), True, [EXACT, {"temperature": 1.3}]),
    ],
)
def test_best_words_and_draws_of_a_split_are_those_of_the_whole(
    name, layout, checked, choices, monkeypatch
):
    # Rows of a shard that are a multiple of these, and rows that are not.
    rows = 128 if name == "softmax" else 80
    monkeypatch.setattr("softbottle.ops.mixture.decode.UNIT", 16)
    mesh = jax.make_mesh(layout, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    head, key = CASES[name].head, jax.random.key(3)
    inputs = oracle.make_inputs(name, tokens=16, rows=rows)[:4]
    point = oracle.cast(inputs, jnp.float32)
    words = 63  # over eight shards the last one holds nothing but padding
    budget = None if name == "mixtape" else 1_000

    def draws(options, *args):
        *output, key = args
        return [head.sample(*output, key, options=options, **each) for each in choices]

    def best_and_draws(*args):
        options = Options(vocab=words, vocab_axis="model", budget_bytes=budget)
        return head.top_k(*args[:4], 5, options=options), draws(options, *args)

    split = jax.shard_map(
        best_and_draws,
        mesh=mesh,
        in_specs=(P(), P("model"), P("model"), P("data"), P()),
        out_specs=P("data"),
        check_vma=checked,
    )
    (values_Tk, ids_Tk), ours = jax.jit(split)(*point, key)
    whole = jax.jit(functools.partial(draws, Options(vocab=words)))
    # A token's noise is by its number on the device.
    parts = [
        whole(*point[:3], hidden_TD, key) for hidden_TD in np.split(point[3], layout[0])
    ]
    for ours_T, *whole_T in zip(ours, *parts, strict=True):
        np.testing.assert_array_equal(ours_T, np.concatenate(whole_T))
    exact_TV = oracle.log_probs(
        name, inputs[0], *(array[:words] for array in inputs[1:3]), inputs[3]
    )
    order_Tk = np.argsort(-exact_TV, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(ids_Tk, order_Tk)
    best_Tk = np.take_along_axis(exact_TV, order_Tk, axis=1)
    np.testing.assert_allclose(values_Tk, best_Tk, atol=1e-5)


@pytest.mark.slow
def test_vmap_over_models_equals_one_model_at_a_time(name="plif_mixed"):
    """By the blocks; objective_test.py has a mixture by stored exponentials."""
    head = CASES[name].head
    problems = [oracle.make_inputs(name, seed=seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *problems)

    def step(*args):
        value, bars = jax.value_and_grad(
            functools.partial(head.loss, options=Options(budget_bytes=1_000)),
            argnums=(0, 1, 2, 3),
        )(*args)
        return value, bars

    results = jax.jit(jax.vmap(step))(*oracle.cast(stacked, jnp.float32))
    values, bars = jax.tree.map(np.asarray, results)
    for model, inputs in enumerate(problems):
        value = np.dot(inputs.weights_T, oracle.nll(name, inputs))
        exact = oracle.gradients(name, inputs, inputs.weights_T)
        oracle.assert_close(values[model], value, "float32")
        ours = jax.tree.map(lambda bar, model=model: bar[model], bars)
        oracle.assert_close(ours, exact, "float32")


@pytest.mark.slow
def test_remat_equals_the_oracle():
    inputs = make_problem("moss")
    head, options = CASES["moss"].head, Options(vocab=WORDS, budget_bytes=1_000)

    @jax.jit
    def run(*args):
        steps = []
        for what in ("loss", "nll"):
            value = jax.checkpoint(
                lambda *args, what=what: total(head, what, args, options)
            )
            steps.append(jax.value_and_grad(value, argnums=(0, 1, 2, 3))(*args))
        return steps

    exact = exact_step("moss", inputs)
    for found in run(*oracle.cast(inputs, jnp.float32)):
        oracle.assert_close(found, exact, "float32")


@pytest.mark.parametrize("name", ["mos", "gss"])
def test_repeated_steps_compile_once(name):
    chex.clear_trace_counter()  # it counts by name, over all tests of a process
    point = oracle.cast(oracle.make_inputs(name), jnp.float32)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(*args):
        bars = jax.grad(CASES[name].head.loss, argnums=1)(*args)
        return args[1] - 0.1 * bars

    for _ in range(3):
        point = point._replace(table_VE=step(*point))


def test_a_head_may_be_a_static_argument():
    head = CASES["mos"].head
    point = oracle.cast(oracle.make_inputs("mos"), jnp.float32)
    nll = jax.jit(lambda head, *args: head.nll(*args), static_argnums=0)
    assert nll(head, *point[:5]).shape == (oracle.TOKENS,)
    assert hash(head) == hash(head)


@pytest.mark.parametrize(
    "head, what, terms",
    [
        ("softmax", "entropy", {}),
        ("partition", "nll", {}),
        # Two of the temperatures by which DEAD is a rounded number.
        ("softmax", "entropy", {"temperature": 0.6}),
        ("mos", "nll", {"temperature": 0.6}),
    ],
)
def test_a_shard_without_a_word_adds_nothing(head, what, terms):
    head = {
        "softmax": softbottle.softmax(),
        "partition": softbottle.partition(2),
        "mos": softbottle.mos(2),
    }[head]
    keys = jax.random.split(jax.random.key(0), 3)
    table_VE = jax.random.normal(keys[0], (16, 4))
    hidden_TD = jax.random.normal(keys[1], (3, 4))
    params, labels_T = head.init(keys[2], 4, 4), jnp.array([1, 0, 5])

    def total(options, table_VE):
        output = (params, table_VE, None)
        measure = functools.partial(head.measure, **terms, options=options)
        return jnp.sum(measure(*output, hidden_TD, labels_T, (what,))[what])

    def step(table_VE):
        options = Options(vocab=13, vocab_axis="model")
        return jax.value_and_grad(functools.partial(total, options))(table_VE)

    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(
        step, mesh=mesh, in_specs=P("model"), out_specs=(P(), P("model"))
    )
    whole = jax.value_and_grad(functools.partial(total, Options(vocab=13)))
    found, expected = jax.jit(split)(table_VE), jax.jit(whole)(table_VE)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
