import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.ops.lstm import api as lstm
from softbottle.ops.lstm import gpu, persistent
from tests.ops import devices

SIZES = (5, 70, 130)  # inputs, then two layers
STEPS, ROWS = 9, 3


def make_problem():
    rng = np.random.default_rng(0)

    def normal(*shape, scale=0.4):
        return jax.device_put((scale * rng.normal(size=shape)).astype(np.float32))

    layers = [
        lstm.Weights(
            normal(i, 4 * h), normal(h, 4 * h, scale=0.1), normal(4 * h), normal(4 * h)
        )
        for i, h in zip(SIZES[:-1], SIZES[1:], strict=True)
    ]
    carries = [lstm.Carry(normal(ROWS, h), normal(ROWS, h)) for h in SIZES[1:]]
    masks = [(rng.integers(0, 2, (ROWS, SIZES[1])) / 0.7).astype(np.float32)]
    return normal(STEPS, ROWS, SIZES[0]), carries, layers, masks


def outputs_and_gradients(implementation, dtype, valid_SB=None, **where):
    *arguments, masks = make_problem()

    def run(*arguments):
        outputs = lstm.stack(
            *arguments,
            masks,
            valid_SB,
            implementation=implementation,
            compute_dtype=dtype,
            **where,
        )
        leaves = jax.tree.leaves(outputs)
        loss = sum(jnp.sum(jnp.sin((n + 1) * leaf)) for n, leaf in enumerate(leaves))
        return loss, outputs

    grads, outputs = jax.jit(jax.grad(run, argnums=(0, 1, 2), has_aux=True))(*arguments)
    return outputs, grads


def assert_near(ours, theirs):
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    for our, their in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        error = np.linalg.norm(np.ravel(our - their))
        assert error < 0.03 * np.linalg.norm(np.ravel(their))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, (9, 4, 0)])
def test_outputs_and_gradients_equal_those_of_the_scan(lengths):
    valid_SB = None
    if lengths is not None:
        valid_SB = jnp.arange(STEPS)[:, None] < jnp.array(lengths)[None]
    ours = outputs_and_gradients("persistent", "bfloat16", valid_SB)
    assert_near(ours, outputs_and_gradients("scan", "float32", valid_SB))
    again = outputs_and_gradients("persistent", "bfloat16", valid_SB)
    chex.assert_trees_all_equal(ours, again)


@pytest.mark.gpu
def test_pieces_of_a_batch_equal_the_scan(monkeypatch):
    monkeypatch.setattr(gpu, "piece", lambda rows, units: 2)
    ours = outputs_and_gradients("persistent", "bfloat16")
    assert_near(ours, outputs_and_gradients("scan", "float32"))


@pytest.mark.gpu
def test_a_row_of_padding_keeps_its_state_to_the_bit():
    inputs_SBI, carries, layers, masks = make_problem()
    carries = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), carries)
    valid_SB = jnp.arange(ROWS)[None] != jnp.ones((STEPS, 1), int)
    outputs_SBH, finals = lstm.stack(
        inputs_SBI,
        carries,
        layers,
        masks,
        valid_SB,
        implementation="persistent",
        compute_dtype="bfloat16",
    )
    row = jax.tree.map(lambda leaf: leaf[1], (finals, tuple(carries)))
    chex.assert_trees_all_equal(*row)
    assert not np.any(outputs_SBH[:, 1])


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason=f"needs jax 0.11.2, this is {jax.__version__}",
)
def test_no_loop_is_left_outside_the_kernels():
    *arguments, masks = make_problem()

    def loss(*arguments):
        outputs_SBH, _ = lstm.stack(
            *arguments,
            masks,
            implementation="persistent",
            compute_dtype="bfloat16",
            device=devices.H200,
        )
        return jnp.sum(outputs_SBH)

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # One forward; backward, layers of different size have one each.
    assert text.count("custom_call @mosaic_gpu") == 3
    assert "stablehlo.while" not in text


def test_what_the_kernels_cannot_run_is_named():
    inputs_SBI, carries, layers, masks = make_problem()
    with pytest.raises(ValueError, match="bfloat16, got float32"):
        lstm.stack(inputs_SBI, carries, layers, masks, implementation="persistent")


@pytest.mark.parametrize(
    "rows, units, dtype, device, reason",
    [
        (12, 960, "float32", devices.H200, "needs compute_dtype bfloat16, got float32"),
        (12, 960, "bfloat16", devices.A100, "needs a Hopper GPU, got NVIDIA A100"),
        (12, 960, "bfloat16", devices.CPU, "needs a Hopper GPU, got cpu"),
        (12, 960, "bfloat16", devices.H100_PCIE, "needs 132 multiprocessors, got 114"),
        (12, 2200, "bfloat16", devices.H200, "holds 2112 units, got 2304"),
        (96, 1150, "bfloat16", devices.H200, "units and 48 rows at a time need"),
    ],
)
def test_a_refusal_names_what_the_device_lacks(rows, units, dtype, device, reason):
    reasons = gpu.refusals(rows, units, jnp.dtype(dtype), device)
    assert any(reason in given for given in reasons)


def test_only_an_old_jax_is_refused_where_everything_else_fits(monkeypatch):
    layer = (12, 960, jnp.dtype("bfloat16"), devices.H200)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    assert [reason[:16] for reason in gpu.refusals(*layer)] == ["needs jax 0.11.2"]
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert gpu.refusals(*layer) == []


def test_layers_run_together_as_far_as_the_chip_holds_them():
    assert gpu.forward_runs(16, [960, 960, 640]) == [slice(0, 3)]
    assert gpu.forward_runs(16, [1152, 1152, 768]) == [
        slice(n, n + 1) for n in range(3)
    ]


@pytest.mark.parametrize(
    "rows, units, step",
    [
        *((12, (960, 960, 620), 12), (20, (960, 960, 620), 10), (20, (620,), 20)),
        *((20, (1150, 1150, 400), 10), (31, (400, 1150), 16), (96, (1150,), 48)),
    ],
)
def test_a_batch_is_run_in_pieces_that_all_layers_take(rows, units, step):
    assert gpu.piece(rows, units) == step


def test_pieces_of_a_batch_are_joined_as_they_were(monkeypatch):
    inputs_SBI, carries, layers, masks = make_problem()
    valid_SB = np.arange(STEPS)[:, None] < np.array((9, 4, 0))[None]
    seen = []

    def scan(inputs_SBI, *arguments):
        seen.append(inputs_SBI.shape[1])
        return lstm.stack(inputs_SBI, *arguments, implementation="scan")

    monkeypatch.setattr(persistent, "_run", scan)
    arguments = inputs_SBI, carries, layers, masks, valid_SB
    whole = jax.jit(lambda *a: persistent.run(*a))(*arguments)
    monkeypatch.setattr(gpu, "piece", lambda rows, units: 2)
    pieces = jax.jit(lambda *a: persistent.run(*a))(*arguments)
    assert seen == [ROWS, 2, 1]
    chex.assert_trees_all_close(whole, pieces, rtol=1e-6)


@pytest.mark.parametrize("units, taken", [(620, 640), (650, 768), (960, 960), (1, 64)])
def test_units_are_padded_to_what_warpgroups_share_evenly(units, taken):
    assert gpu.padded(12, units) == (16, taken)


@pytest.mark.slow
def test_the_automatic_choice_is_the_wavefront_where_no_kernel_runs():
    chosen = outputs_and_gradients("auto", "bfloat16", device=devices.A100)
    expected = outputs_and_gradients("wavefront", "bfloat16")
    chex.assert_trees_all_equal(chosen, expected)


def test_a_forward_plan_divides_ptbs_layers_among_130_blocks():
    plan = gpu.ForwardPlan(steps=70, rows=16, live=12, units=(960, 960, 640))
    assert (plan.layers, plan.width) == (3, 960)
    # 960 columns are 15 chunks of 64: five for each of three warpgroups.
    assert (plan.groups, plan.share) == (3, 320)
    # With one tile per block the layers would need 160 of 132 multiprocessors.
    assert plan.blocks == [30, 60, 40]
    assert plan.tiles == 2


def test_a_forward_plan_of_one_layer_has_a_tile_per_block():
    plan = gpu.ForwardPlan(steps=70, rows=16, live=12, units=(1152,))
    assert (plan.blocks, plan.tiles, plan.share) == ([72], 1, 384)


def test_a_forward_plan_refuses_layers_that_do_not_run_at_once():
    plan = gpu.ForwardPlan(steps=70, rows=16, live=12, units=(1152, 1152))
    with pytest.raises(ValueError, match=r"\(1152, 1152\) units"):
        _ = plan.blocks


@pytest.mark.parametrize("layers, kinds", [(1, 1), (2, 2), (3, 2)])
def test_a_backward_plan_has_a_cluster_per_64_units(layers, kinds):
    plan = gpu.BackwardPlan(steps=70, rows=16, live=12, units=(640,) * layers)
    assert (plan.clusters, plan.kinds) == ([10] * layers, kinds)
    assert (plan.groups, plan.share) == (2, 320)
