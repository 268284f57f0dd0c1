import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from softbottle.heads import base
from tests import oracle

MOS = oracle.CASES["mos"].head


def call(head=MOS, method="nll", **changes):
    name = "mos" if head is MOS else "softmax"
    point = oracle.cast(oracle.make_inputs(name), jnp.float32)._replace(**changes)
    return getattr(head, method)(*(point if method == "loss" else point[:5]))


@pytest.mark.parametrize("method", ["nll", "loss"])
def test_a_hidden_state_with_rows_and_positions_is_refused(method):
    with pytest.raises(ValueError, match=r"hidden_TD .*\(2, 11, 5\).*flatten"):
        call(method=method, hidden_TD=np.zeros((2, 11, 5), np.float32))


@pytest.mark.parametrize("shape", [(5,), (), (11, 1)])
def test_weights_of_another_shape_are_refused_by_name(shape):
    with pytest.raises(ValueError, match="weights_T"):
        call(method="loss", weights_T=np.ones(shape, np.float32))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("params", np.ones((11, 5)), "what head.init gives, got ndarray"),
        ("table_VE", np.ones((37, 7), int), "of floating-point numbers, got int"),
        ("hidden_TD", np.ones((11, 5), bool), "of floating-point numbers, got bool"),
        ("hidden_TD", np.ones((11, 5), complex), "-point numbers, got complex128"),
        ("hidden_TD", [[1.0] * 5], "an array of floating-point numbers, got list"),
        ("labels_T", [0] * 11, "have a word for each .* got list"),
        ("weights_T", 1.0, "have a weight for each .* got float"),
    ],
)
def test_what_is_no_such_array_is_refused_by_name(name, value, message):
    with pytest.raises(ValueError, match=f"{name} must .*{message}"):
        call(method="loss", **{name: value})


@pytest.mark.parametrize("method", ["loss", "nll", "measure", "log_probs", "sample"])
@pytest.mark.parametrize("options", [{}, None, {"compute_dtype": "bfloat16"}])
def test_options_that_are_none_are_refused_with_an_example(method, options):
    point = oracle.cast(oracle.make_inputs("mos"), jnp.float32)
    more = {
        "measure": (point.labels_T, ("nll",)),
        "log_probs": (),
        "sample": (jax.random.key(0),),
    }.get(method, (point.labels_T,))
    with pytest.raises(ValueError, match=r"options must be softbottle.Options\("):
        getattr(MOS, method)(*point[:4], *more, options=options)


@pytest.mark.parametrize("k", [0, 38, 2.0, "3", True])
@pytest.mark.parametrize("name", ["softmax", "mixtape"])
def test_a_number_of_best_words_that_there_cannot_be_is_refused(name, k):
    point = oracle.cast(oracle.make_inputs(name), jnp.float32)
    with pytest.raises(ValueError, match=f"between 1 and .* 37, got {k!r}"):
        oracle.CASES[name].head.top_k(*point[:4], k)


@pytest.mark.parametrize(
    "make, wrong",
    [
        (softbottle.softcap, "cap must be a finite number, got 'a'"),
        (softbottle.plif, "knots must be a number of segments or positions, got 'a'"),
        (lambda value: softbottle.gss(value, 1.0), "center must be a finite number"),
        (lambda value: softbottle.gss(0.0, value), "slope must be a finite number"),
        (lambda value: softbottle.plif(8, span=value), "span must be a finite number"),
        (lambda _: softbottle.mos(True), "components must be an integer >= 1"),
        (softbottle.cached, "head must be a head, for example softbottle.mos"),
    ],
)
def test_a_setting_of_another_kind_is_refused_by_name(make, wrong):
    with pytest.raises(ValueError, match=f"^{wrong}"):
        make("a")


def test_a_table_of_another_width_is_refused_with_both_widths():
    with pytest.raises(ValueError, match=r"a table 6 wide: latent_DKE \(5, 3, 7\)"):
        call(table_VE=np.zeros((37, 6), np.float32))


@pytest.mark.parametrize("method", ["nll", "loss"])
def test_a_hidden_state_of_another_width_is_refused_with_both_widths(method):
    with pytest.raises(ValueError, match="hidden_TD is 6 wide, .* of states 5 wide"):
        call(method=method, hidden_TD=np.zeros((11, 6), np.float32))


@pytest.mark.parametrize("method", ["nll", "loss"])
def test_labels_for_other_tokens_are_refused_with_both_numbers(method):
    with pytest.raises(ValueError, match="each of the 11 tokens .* got .10,."):
        call(method=method, labels_T=np.zeros(10, np.int32))


@pytest.mark.parametrize(
    "head, other",
    [
        (softbottle.mos(4), softbottle.mos(3)),
        (softbottle.moc(3), softbottle.moc(4)),
        (softbottle.partition(2, components=3), softbottle.partition(2)),
        (softbottle.mixtape(4, frequent=9), softbottle.mixtape(2, frequent=9)),
        (softbottle.doc(3, 2), softbottle.doc(3, 1)),
        (softbottle.mfs(), softbottle.mfs(classes=2)),
    ],
    ids=repr,
)
def test_parameters_of_another_number_of_contexts_are_refused_with_both(head, other):
    width = 4 * head.layers * head.positions
    params = jax.eval_shape(lambda key: head.init(key, width, 4), jax.random.key(0))
    table_VE, hidden_TD = jnp.zeros((37, 4)), jnp.zeros((3, width))

    def nll(params):
        return other.nll(params, table_VE, None, hidden_TD, jnp.arange(3))

    match = rf"of {head.contexts} contexts .* has {other.contexts}: latent_"
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(nll, params)


def test_parameters_with_a_path_are_none_of_tanh_contexts():
    params = softbottle.mos(3).init(jax.random.key(0), 6, 4)
    output = (params, jnp.zeros((37, 4)), None)
    with pytest.raises(ValueError, match=r"project_DE \(6, 4\), which it has not"):
        softbottle.mos(3, "tanh").nll(*output, jnp.zeros((3, 6)), jnp.arange(3))


@pytest.mark.parametrize(
    "head, other, wrong",
    [
        (
            softbottle.partition(2, components=3),
            softbottle.partition(6),
            r"prior_DK \(",
        ),
        (
            softbottle.mixtape(2, frequent=3),
            softbottle.mixtape(2, frequent=1),
            r"\(1, ",
        ),
        (softbottle.plif(10), softbottle.plif(20), r"slope_N \(10,\) instead of \(20,"),
        (softbottle.softmax(), softbottle.plif(20), r"no slope_N \(20,\)"),
        (softbottle.lowrank(4), softbottle.lowrank(1), "needs a table of that width"),
    ],
    ids=repr,
)
def test_parameters_of_another_head_are_refused(head, other, wrong):
    params = jax.eval_shape(lambda key: head.init(key, 4, 4), jax.random.key(0))
    arrays = jnp.zeros((37, 4)), None, jnp.zeros((3, 4)), jnp.arange(3)
    with pytest.raises(ValueError, match=wrong):
        jax.eval_shape(lambda params: other.nll(params, *arrays), params)


def test_without_weights_all_tokens_count_one():
    point = oracle.cast(oracle.make_inputs("mos"), jnp.float32)
    loss = jax.jit(MOS.loss)
    assert loss(*point[:5]) == loss(*point[:5], np.ones(oracle.TOKENS, np.float32))


def test_a_setting_that_a_head_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(TypeError, match=r"mos\(components: int, context.*'K'"):
        softbottle.mos(K=3)
    with pytest.raises(TypeError, match=r"moc\(components.*'components'"):
        softbottle.moc()


def test_a_mask_that_does_not_broadcast_is_refused_with_its_shape():
    mask = jnp.ones((4, 3, 7))
    with pytest.raises(ValueError, match=r"4,\s?3,\s?7"):
        base.masked(jnp.zeros((11, 3, 7)), mask)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "int32", "bool"])
def test_the_kind_of_the_weights_does_not_change_the_loss(kind, mixed_dtypes):
    inputs = oracle.make_inputs("mos")
    point = oracle.cast(inputs, jnp.float32)
    ones_T = np.ones(oracle.TOKENS)

    @jax.jit
    def run(weights_T):
        def loss(table_VE):
            return MOS.loss(point.params, table_VE, *point[2:5], weights_T)

        return loss(point.table_VE), jax.value_and_grad(loss)(point.table_VE)

    plain, (value, bar_VE) = run(jax.device_put(ones_T.astype(kind)))
    np.testing.assert_allclose(plain, value, rtol=1e-6)
    oracle.assert_close(value, oracle.nll("mos", inputs).sum(), "float32")
    exact_VE = oracle.gradients("mos", inputs, ones_T)[1]
    oracle.assert_close(bar_VE, exact_VE, "float32")


@pytest.mark.slow
def test_float32_weights_leave_a_float64_loss_in_float64(float64):
    inputs = oracle.make_inputs("mos")
    point = oracle.cast(inputs, jnp.float64)
    weights_T = np.where(np.arange(oracle.TOKENS) % 3 == 0, 0.0, 1.0)
    point = point._replace(weights_T=weights_T.astype(np.float32))
    value, _ = jax.jit(jax.value_and_grad(MOS.loss, argnums=1))(*point)
    exact = np.dot(weights_T, oracle.nll("mos", inputs))
    oracle.assert_close(value, exact, "float64")


@pytest.mark.parametrize(
    "make", [softbottle.mos, softbottle.moc, softbottle.moss], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("components", [0, -3, 2.0, "4"])
def test_components_must_be_a_positive_integer(make, components):
    with pytest.raises(ValueError, match=f"components .*{components!r}"):
        make(components)


@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "gss", "plif", "softcap"])
def test_heads_without_projection_need_equal_widths(name):
    with pytest.raises(ValueError, match="hidden_dim=5 .*context_dim=7"):
        oracle.CASES[name].head.init(jax.random.key(0), 5, 7)


@pytest.mark.parametrize("name", ["softmax", "mos"])
def test_the_same_key_gives_the_same_parameters_and_another_key_others(name):
    case = oracle.CASES[name]

    def init(seed):
        return jax.tree.leaves(case.head.init(jax.random.key(seed), case.hidden_dim, 7))

    for ours, same, other in zip(init(0), init(0), init(1), strict=True):
        np.testing.assert_array_equal(ours, same)
        assert not np.array_equal(ours, other)


VALUES = {
    "softmax()": softbottle.softmax,
    "mos(components=15)": lambda: softbottle.mos(np.int64(15)),
    "moc(components=2)": lambda: softbottle.moc(2),
    "moss(components=2)": lambda: softbottle.moss(components=2),
    "sigsoftmax()": softbottle.sigsoftmax,
    "gss(center=-1.0, slope=2.5)": lambda: softbottle.gss(-1, 2.5),
    "gss(center=0.0, slope=2.0, components=3)": lambda: softbottle.gss(0.0, 2, 3),
    "plif(knots=7, span=2.0)": lambda: softbottle.plif(7, 2),
    "plif(knots=(-1.0, 2.0), span=20.0)": lambda: softbottle.plif(np.array([-1, 2])),
    "softcap(cap=30.0)": lambda: softbottle.softcap(30),
    "lowrank(rank=7)": lambda: softbottle.lowrank(7),
    "mos(components=7, context='tanh', active=2)": lambda: softbottle.mos(
        7, "tanh", active=2
    ),
    "partition(classes=4)": lambda: softbottle.partition(4),
    "mixtape(components=4, frequent=9)": lambda: softbottle.mixtape(frequent=9),
    "mixtape(components=2, context='tanh', frequent=9, gate_dim=3)": lambda: (
        softbottle.mixtape(2, "tanh", frequent=9, gate_dim=np.int64(3))
    ),
    "doc(components=3, lower=2)": lambda: softbottle.doc(3, 2),
    "mfs(components=3)": softbottle.mfs,
    "mfs(components=2, positions=1)": lambda: softbottle.mfs(2, positions=1),
    "partition(classes=4, components=3)": lambda: softbottle.partition(4, 3),
}


@pytest.mark.parametrize("call", VALUES)
def test_a_head_is_a_value_that_reads_like_its_call(call):
    head, again = VALUES[call](), VALUES[call]()
    assert head == again and hash(head) == hash(again)
    assert repr(head) == call
    assert eval(call, vars(softbottle)) == head
    others = [make() for other, make in VALUES.items() if other != call]
    assert head not in others
    assert repr(softbottle.cached(head)) == f"cached({call})"
    assert softbottle.cached(head) == softbottle.cached(again)


def test_a_head_has_no_setting_that_can_be_changed():
    with pytest.raises(AttributeError):
        softbottle.mos(3).components = 4


def test_equal_heads_as_static_arguments_trace_once():
    traces = []
    point = oracle.cast(oracle.make_inputs("mos"), jnp.float32)

    def loss(head, *inputs):
        traces.append(head)
        return head.loss(*inputs)

    jitted = jax.jit(loss, static_argnums=0)
    for components in (3, 3, np.int64(3)):
        jitted(softbottle.mos(components, "tanh"), *point)
    assert len(traces) == 1
    jitted(softbottle.moss(3, "tanh"), *point)
    assert len(traces) == 2


@pytest.mark.parametrize("method", ["loss", "nll", "log_probs", "top_k", "sample"])
def test_help_names_the_arrays_the_result_and_the_errors(method):
    text = pydoc.render_doc(getattr(softbottle.mos(3), method))
    for word in (
        "table_VE",
        "bias_V",
        "hidden_TD",
        "Returns:",
        "Raises:",
        "ValueError",
    ):
        assert word in text
