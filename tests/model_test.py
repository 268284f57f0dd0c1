import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from softbottle import config as configs
from softbottle import heads, sharding
from softbottle import model as models
from softbottle.backbones import awd_lstm
from softbottle.data.batches import Batch
from tests import tiny

VOCAB, WIDTH, LAST, ROWS, LENGTH = 11, 5, 7, 3, 6
SEVERAL_LAYERS = ("doc", "mfs")
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def make_key(seed):
    """The generator that compiles fastest."""
    return jax.random.key(seed, impl="unsafe_rbg")


def make_config(head="mos", backbone="window", **regularise):
    config = configs.Config()
    config.head.name = head
    for name, value in {
        "components": 2,
        "center": 0.5,
        "slope": 2.0,
        "knots": 13,
        "rank": WIDTH,
        "classes": 3,
        "frequent": 3,
        "lower": 2,
        "layers": 2,
        "positions": 2,
    }.items():
        if name in heads.settings(head):
            setattr(config.head, name, value)
    model = config.model
    model.backbone, model.layers, model.order = backbone, 1, 3
    if head in SEVERAL_LAYERS:
        model.layers = 2
    model.embed_dim, model.hidden_dim, model.attention_heads = WIDTH, 8, 2
    model.last_dim = WIDTH if head in ("softmax", "sigsoftmax") else LAST
    model.table_range = 1.0
    for name, value in regularise.items():
        setattr(config.regularise, name, value)
    return config


def make(config, vocab=VOCAB):
    """A model and parameters that numpy draws, so that no program makes them."""
    model = models.make(configs.validate(config), vocab)
    return model, tiny.draw(jax.eval_shape(model.init, make_key(0)))


def make_batch(rows=ROWS, length=LENGTH, seed=0):
    ids_BS = np.random.default_rng(seed).integers(0, VOCAB, (rows, length + 1))
    ones_BS = np.ones((rows, length))
    return Batch(
        ids_BS[:, :-1].astype(np.int32),
        ids_BS[:, 1:].astype(np.int32),
        ones_BS.astype(np.float32),
        ones_BS.astype(np.int32),
    )


def padded(batch, columns):
    """The batch with columns of no weight, no segment and senseless words."""
    junk = {"ids_BS": 3, "labels_BS": 10**6, "weights_BS": 0, "segments_BS": 0}
    return Batch(
        **{
            name: np.pad(
                getattr(batch, name), ((0, 0), (0, columns)), constant_values=value
            )
            for name, value in junk.items()
        }
    )


@functools.partial(jax.jit, static_argnums=0)
def loss_of(model, params, batch, seed=1):
    """The loss from an empty state; compiled once for models of equal settings."""
    carry = model.initial_carry(len(batch.ids_BS))
    return model.loss(params, batch, carry, make_key(seed))[0]


@functools.partial(jax.jit, static_argnums=0)
def hidden_of(model, params, batch):
    """The states without dropout, from an empty one."""
    return model.hidden(params, batch, model.initial_carry(len(batch.ids_BS)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["window", "awd_lstm"])
def test_the_penalty_is_ar_on_the_states_plus_tar_on_their_steps(backbone):
    config = make_config("mos", backbone, activation=2.0, slowness=3.0)
    model, params = make(config)
    batch = make_batch()
    hidden_BSD = hidden_of(model, params, batch)
    hidden_BSD = np.asarray(hidden_BSD, np.float64)
    ar = 0.0
    for value in hidden_BSD.ravel():
        ar += value**2 / hidden_BSD.size
    steps_BSD = np.diff(hidden_BSD, axis=1)
    tar = (steps_BSD**2).sum() / (ROWS * (LENGTH - 1) * LAST)
    loss = loss_of(model, params, batch)
    np.testing.assert_allclose(loss.penalty, 2 * ar + 3 * tar, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["mos", "doc"])
def test_an_uneven_use_of_the_components_is_punished(head):
    model, params = make(make_config(head, "awd_lstm", balance=2.0))
    batch = make_batch()
    batch.weights_BS[0, :2] = 0
    loss = loss_of(model, params, batch)
    hidden_BSD = hidden_of(model, params, batch)
    log_prior_TK, _ = jax.jit(model.head.mix)(
        params["head"], hidden_BSD.reshape(-1, hidden_BSD.shape[2])
    )
    share_K = batch.weights_BS.ravel() @ np.exp(np.asarray(log_prior_TK))
    expected = 2 * (np.std(share_K) / np.mean(share_K)) ** 2
    assert expected > 1e-4
    np.testing.assert_allclose(loss.penalty, expected, rtol=1e-4)


@pytest.mark.parametrize("head", ["softmax", "partition", "mixtape"])
def test_a_head_without_mixture_weights_has_nothing_to_balance(head):
    config = make_config(head, balance=1.0)
    config.head.components = {"partition": 1, "mixtape": 2}.get(head)
    with pytest.raises(ValueError, match="regularise.balance is for a mixture, and "):
        make(config)


@pytest.mark.slow
def test_a_gain_multiplies_what_the_head_reads_and_nothing_else():
    config, batch = make_config("mos", "awd_lstm", activation=1.0), make_batch()
    plain, params = make(config)
    config.model.gain = 3.0
    model, _ = make(config)
    hidden_BSD = 3 * hidden_of(plain, params, batch)
    np.testing.assert_allclose(hidden_of(model, params, batch), hidden_BSD, **CLOSE)
    loss = loss_of(model, params, batch)
    tokens = (hidden_BSD.reshape(-1, LAST), batch.labels_BS.reshape(-1))
    total = jax.jit(model.head.loss)(*model.output(params), *tokens)
    np.testing.assert_allclose(loss.total, total, **CLOSE)
    assert loss.penalty == loss_of(plain, params, batch).penalty > 0


@pytest.mark.slow
def test_tar_reads_the_raw_states_and_ar_the_dropped_ones():
    batch = make_batch()
    penalties = {}
    for name in ("activation", "slowness"):
        model, params = make(make_config(**{name: 1.0, "output": 0.5}))
        loss = loss_of(model, params, batch)
        penalties[name] = float(loss.penalty)
    raw_BSD = np.asarray(hidden_of(model, params, batch))
    tar = np.mean(np.diff(raw_BSD, axis=1) ** 2)
    assert penalties["slowness"] == pytest.approx(tar, rel=1e-5)
    assert penalties["activation"] != pytest.approx(np.mean(raw_BSD**2), rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["window", "awd_lstm"])
def test_padding_changes_neither_loss_nor_penalty_nor_carry_nor_gradient(backbone):
    config = make_config("mos", backbone, activation=2.0, slowness=3.0)
    model, params = make(config)

    @jax.jit
    def measure(batch):
        def objective(params):
            carry = model.initial_carry(ROWS)
            loss, carry = model.loss(params, batch, carry, make_key(1))
            return loss.total / loss.tokens + loss.penalty, (loss, carry)

        return jax.grad(objective, has_aux=True)(params)

    bare, wide = measure(make_batch()), measure(padded(make_batch(), 5))
    chex.assert_trees_all_close(bare, wide, **CLOSE)
    if backbone == "window":  # the nll is that of the states, whoever made them
        nll = jax.jit(model.nll)
        nll_BS, _ = nll(params, padded(make_batch(), 5), model.initial_carry(ROWS))
        np.testing.assert_array_equal(nll_BS[:, LENGTH:], 0.0)
        np.testing.assert_allclose(nll_BS.sum(), bare[1][0].total, rtol=1e-5)


def test_rows_of_uneven_lengths_are_averaged_over_their_real_positions():
    model, params = make(make_config(activation=2.0, slowness=3.0))
    batch = make_batch()
    live_BS = np.arange(LENGTH)[None] < np.array([6, 2, 1])[:, None]
    batch = batch._replace(
        weights_BS=live_BS.astype(np.float32), segments_BS=live_BS.astype(np.int32)
    )
    hidden_BSD = hidden_of(model, params, batch)
    squares, steps = [], []
    for row, count in enumerate([6, 2, 1]):
        real_SD = np.asarray(hidden_BSD[row, :count], np.float64)
        squares += list((real_SD**2).mean(axis=1))
        steps += list((np.diff(real_SD, axis=0) ** 2).mean(axis=1))
    loss = loss_of(model, params, batch)
    assert float(loss.tokens) == 9
    expected = 2 * np.mean(squares) + 3 * np.mean(steps)
    np.testing.assert_allclose(loss.penalty, expected, **CLOSE)


def test_row_dropout_leaves_the_tied_output_table_alone():
    # So high a rate drops every word of the input.
    model, params = make(make_config(rows=0.9999))
    batch = make_batch()
    blank = params | {"table_VE": np.zeros_like(params["table_VE"])}
    hidden_BSD = hidden_of(model, blank, batch)
    nll_T = jax.jit(model.head.nll)(
        *(params["head"], params["table_VE"], params["bias_V"]),
        hidden_BSD.reshape(-1, LAST),
        batch.labels_BS.reshape(-1),
    )
    loss = loss_of(model, params, batch)
    np.testing.assert_allclose(loss.total, nll_T.sum(), rtol=1e-5)


def test_a_dropped_word_is_dropped_wherever_it_stands_and_a_kept_one_is_scaled():
    model, params = make(make_config(rows=0.75, activation=1.0))
    batch = make_batch()
    batch = batch._replace(ids_BS=np.full_like(batch.ids_BS, 4))
    expected = set()
    for scale in (0.0, 4.0):
        scaled = params | {"table_VE": scale * params["table_VE"]}
        hidden_BSD = hidden_of(model, scaled, batch)
        expected.add(round(float(np.mean(np.square(hidden_BSD))), 4))
    found = {
        round(float(loss_of(model, params, batch, seed).penalty), 4)
        for seed in range(20)
    }
    assert found == expected


class Watched(type(softbottle.mos(2))):
    """A mixture of softmaxes whose loss is the latent mask that it is given."""

    def loss(self, *arguments, latent_mask, **options):
        return latent_mask


@pytest.mark.slow
def test_the_latent_mask_is_locked_over_time_and_drawn_for_each_unit():
    rows, rate = 31, 0.4
    model, params = make(make_config(latent=rate))
    model = dataclasses.replace(model, head=Watched(2))
    batch = make_batch(rows, 3)
    masks_BSKE = [
        np.reshape(loss_of(model, params, batch, seed).total, (rows, 3, 2, WIDTH))
        for seed in (1, 2)
    ]
    for mask_BSKE in masks_BSKE:
        np.testing.assert_array_equal(mask_BSKE, mask_BSKE[:, :1] + 0 * mask_BSKE)
        np.testing.assert_allclose(np.unique(mask_BSKE), [0, 1 / (1 - rate)], rtol=1e-6)
    kept_BKE = masks_BSKE[0][:, 0] > 0
    again_BKE = masks_BSKE[1][:, 0] > 0
    # Independent draws agree as often as chance has it: rate^2 + (1 - rate)^2.
    chance = rate**2 + (1 - rate) ** 2
    for one, other in (
        (kept_BKE[1:], kept_BKE[:-1]),
        (kept_BKE[:, 0], kept_BKE[:, 1]),
        (kept_BKE[:, :, 1:], kept_BKE[:, :, :-1]),
        (kept_BKE, again_BKE),
    ):
        deviation = np.sqrt(chance * (1 - chance) / one.size)
        assert abs((one == other).mean() - chance) < 4 * deviation


@pytest.mark.slow
def test_the_latent_mask_of_a_single_head_masks_its_state():
    model, params = make(make_config("softmax", latent=0.5))
    plain, _ = make(make_config("softmax"))
    loss = loss_of(model, params, make_batch())
    undropped = loss_of(plain, params, make_batch())
    assert np.isfinite(loss.total) and loss.total != undropped.total


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_are_no_words_change_neither_loss_nor_counts(tied):
    config, wide_config = make_config(), make_config()
    config.model.tied = wide_config.model.tied = tied
    wide_config.model.vocab_multiple = 8
    (model, params), (wide_model, wide) = make(config), make(wide_config)
    for name in ("table_VE", "output_VE", "bias_V"):
        if name in params:
            assert len(wide[name]) == 16
            # Whatever stands in the rows beyond the vocabulary.
            wide[name][:VOCAB], wide[name][VOCAB:] = params[name], 7.0
    wide |= {name: params[name] for name in ("backbone", "head")}
    batch = make_batch()
    loss, wide_loss = loss_of(model, params, batch), loss_of(wide_model, wide, batch)
    chex.assert_trees_all_close(loss, wide_loss, **CLOSE)
    counts = {
        models.count_parameters(params, VOCAB),
        models.count_parameters(wide, VOCAB),
        sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
    assert len(counts) == 1


# Every kind of parameters that a head has, and every backbone. The heads that are left
# out have a softmax's or MoS's, and tests/heads has every head's gradient.
FINITE = [
    *((head, "window") for head in ("softmax", "mos", "plif", "lowrank")),
    *(("partition", "window"), ("mixtape", "window")),
    *(("doc", "transformer"), ("mfs", "awd_lstm")),
]
# A backbone knows no more of a head than how many layers and positions it reads.
FITTING = [
    *((head, "window") for head in heads.HEADS if head not in SEVERAL_LAYERS),
    *((head, "awd_lstm") for head in ("softmax", "mos", *SEVERAL_LAYERS)),
    *((head, "transformer") for head in ("softmax", "mos", *SEVERAL_LAYERS)),
]


@pytest.mark.slow
@pytest.mark.parametrize("head, backbone", FINITE)
def test_a_model_has_a_finite_gradient_in_every_parameter(head, backbone):
    config = make_config(head, backbone, output=0.2, latent=0.2)
    if head == "mfs":
        # Its hidden layer has no gradient while the facets start at zero.
        config.head.context = "tanh"
    model = models.make(configs.validate(config), VOCAB)
    batch, carry = make_batch(2, 3), model.initial_carry(2)

    def total(params):
        return model.loss(params, batch, carry, make_key(1))[0].total

    # Not jitted: models of equal shapes share the programs that draw them.
    params = model.init(make_key(0))
    grads = jax.device_get(jax.jit(jax.grad(total))(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)
    chex.assert_tree_all_finite(grads)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(grads["head"]))
    assert np.any(grads["table_VE"] != 0) and np.any(grads["bias_V"] != 0)


@pytest.mark.parametrize("head", SEVERAL_LAYERS)
def test_a_head_that_reads_more_layers_than_there_are_is_refused(head):
    config = make_config(head, "awd_lstm")
    config.model.layers = 1
    with pytest.raises(ValueError, match="reads 2 layers.* has 1 .model.layers"):
        models.make(configs.validate(config), VOCAB)


@pytest.mark.parametrize("head, backbone", FITTING)
def test_any_head_fits_any_backbone_that_has_its_layers(head, backbone):
    config = make_config(head, backbone)
    if head in ("gss", "plif", "softcap"):
        config.head.components = None
        config.model.last_dim = WIDTH
    model = models.make(configs.validate(config), VOCAB)
    params = jax.eval_shape(model.init, make_key(0))
    batch = jax.tree.map(jnp.asarray, make_batch(2, 3))
    carry = model.initial_carry(2)

    def total(params):
        return model.loss(params, batch, carry, make_key(0))[0].total

    grads = jax.eval_shape(jax.grad(total), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)


@pytest.mark.slow
def test_bfloat16_products_keep_float32_parameters_and_gradients():
    config = make_config()
    config.model.compute_dtype = "bfloat16"
    rough, params = make(config)
    exact, _ = make(make_config())
    batch, carry = make_batch(), exact.initial_carry(ROWS)

    def total(model):
        return lambda params: model.loss(params, batch, carry, make_key(0))[0].total

    grads = jax.eval_shape(jax.grad(total(rough)), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)
    losses = [jax.jit(total(model))(params) for model in (rough, exact)]
    np.testing.assert_allclose(*losses, rtol=2e-2)


PTB_MOS, WT2_MOS, AWD = (280, 960, 620, 3), (300, 1150, 650, 3), (400, 1150, 400, 3)
COUNTS = [
    ("mos", 15, 10_000, PTB_MOS, 21_500_620),
    ("mos", 1, 10_000, PTB_MOS, 19_057_620),
    ("mos", 3, 10_000, PTB_MOS, 19_406_620),
    ("mos", 5, 10_000, PTB_MOS, 19_755_620),
    ("mos", 10, 10_000, PTB_MOS, 20_628_120),
    ("mos", 20, 10_000, PTB_MOS, 22_373_120),
    ("mos", 15, 33_278, WT2_MOS, 34_909_528),
    ("softmax", 1, 10_000, AWD, 24_221_600),
    ("softmax", 1, 33_278, AWD, 33_556_078),
    ("softmax", 1, 100_000, (1024, 1024, 1024, 2), 119_293_600),
    ("mos", 7, 100_000, (900, 1024, 1024, 2), 112_850_364),
]


@pytest.mark.parametrize(
    "head, components, vocab, sizes, expected, multiple",
    [*((*case, 1) for case in COUNTS), *((*case, 64) for case in COUNTS[:9:8])],
)
def test_the_papers_models_have_exactly_their_parameters(
    head, components, vocab, sizes, expected, multiple
):
    config = configs.Config()
    config.head.name = head
    if head == "mos":
        config.head.components = components
        config.head.context = "tanh"
    model = config.model
    model.backbone, model.tied, model.vocab_multiple = "awd_lstm", True, multiple
    model.embed_dim, model.hidden_dim, model.last_dim, model.layers = sizes
    functions = models.make(configs.validate(config), vocab)
    params = jax.eval_shape(functions.init, make_key(0))
    assert models.count_parameters(params, vocab) == expected


# Products per token of the backbone, the head and the output table, then what is added
# or multiplied by one number per token and parameter. 4 gates of 7 units read 5 and 7
# numbers; the transformer is 8 wide, 24 inside.
LSTM, LSTM_BIASES = 4 * 7 * (5 + 7), 2 * 4 * 7
BLOCK, SCALES = 4 * 8 * 8 + 3 * 8 * 24, 3 * 8


@pytest.mark.parametrize(
    "head, backbone, output, expected",
    [
        (
            *("mos", "awd_lstm", None),
            (LSTM + 7 * 2 + 7 * 2 * 5 + 2 * 11 * 5) + (LSTM_BIASES + 2 * 5 + 11),
        ),
        (
            *("mos", "awd_lstm", 3),
            (LSTM + 7 * 2 + 7 * 2 * 3 + 2 * 11 * 3) + (LSTM_BIASES + 2 * 3 + 11),
        ),
        (
            *("softmax", "transformer", None),
            (5 * 8 + BLOCK + 8 * 5 + 11 * 5) + (SCALES + 11),
        ),
    ],
    ids=["tied", "untied", "transformer"],
)
def test_the_flop_of_a_step_are_those_of_its_products(head, backbone, output, expected):
    config = make_config(head, backbone)
    config.model.layers, config.model.tied = 1, output is None
    config.model.context_dim = output
    if head == "mos":
        config.head.context = "tanh"
    init = models.make(configs.validate(config), VOCAB).init
    params = jax.eval_shape(init, make_key(0))
    # Twice as many flop, and as many again for each of two gradients.
    assert models.step_flop(config, params, 13) == 13 * 3 * 2 * expected


@pytest.mark.slow
def test_models_of_equal_settings_are_equal_and_traced_once():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def nll(model, params, batch, carry):
        traces.append(model)
        return model.nll(params, batch, carry)

    batch = make_batch()
    for _ in range(2):
        model, params = make(make_config())
        nll(model, params, batch, model.initial_carry(ROWS))
    other, _ = make(make_config())
    assert len(traces) == 1 and traces[0] == other
    assert hash(traces[0]) == hash(other)
    assert other != make(make_config(output=0.1))[0]
    assert other != make(make_config(), VOCAB + 1)[0]


def test_a_model_keeps_the_settings_that_it_was_made_with():
    config = make_config()
    model = models.make(config, VOCAB)
    config.model.tied = False
    assert model.config.model.tied


def test_a_low_rank_head_needs_a_table_of_its_rank():
    config = make_config("lowrank")
    config.head.rank = 3
    message = r"lowrank\(3\) .*context_dim=5.*model.context_dim"
    with pytest.raises(ValueError, match=message):
        make(config)


def test_a_head_that_reads_the_state_needs_a_table_of_its_width():
    config = make_config("softmax")
    config.model.last_dim = LAST
    with pytest.raises(ValueError, match="hidden_dim=7 .*context_dim=5.*last_dim"):
        make(config)


def test_a_model_says_how_its_step_is_computed():
    config = make_config("plif", "awd_lstm")
    config.data.rows, config.data.length = 8, 6
    config.head.budget_mib, config.optim.accumulate = 1, 2
    model = models.make(configs.validate(config), 50_000)
    # 24 tokens of two components and 50,000 float32 logits each, 1 MiB at a time.
    choices = model.choices()
    assert choices == ("blocked", 2, "wavefront")
    assert str(choices) == "loss by blocked, 2 tokens at a time, LSTM by wavefront"
    softmax, _ = make(make_config("softmax"))
    assert softmax.choices().recurrence is None


@pytest.mark.parametrize(
    ("backbone", "recurrence", "flags", "options"),
    [
        ("awd_lstm", "persistent", "", {"xla_gpu_enable_triton_gemm": False}),
        ("awd_lstm", "persistent", "--xla_gpu_enable_triton_gemm=true", None),
        ("awd_lstm", "wavefront", "", None),
        ("transformer", None, "", None),
    ],
)
def test_steps_with_our_recurrent_kernel_have_no_gemms_by_triton(
    monkeypatch, backbone, recurrence, flags, options
):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(awd_lstm.AwdLstm, "recurrence", lambda *_: recurrence)
    model = models.make(configs.validate(make_config("mos", backbone)), VOCAB)
    assert model.compiler_options == options


def test_the_choices_on_a_mesh_are_those_of_a_device_s_share():
    config = make_config("plif")
    config.data.rows, config.data.length, config.head.budget_mib = 8, 6, 1
    config.mesh.data, config.mesh.model, config.model.vocab_multiple = 4, 2, 2
    config = configs.validate(config)
    model = models.make(config, 50_000, sharding.make_mesh(config.mesh))
    assert model.device.count == 8
    # 12 tokens of two components and 25,000 words: three equal chunks.
    assert model.choices() == ("blocked", 4, None)
