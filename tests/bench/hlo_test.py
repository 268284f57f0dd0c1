import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from softbottle.bench import hlo

TEXT = textwrap.dedent("""\
    HloModule jit_step, is_scheduled=true

    %condition.1 (p: (s32[], f32[4])) -> pred[] {
      %bound = s32[]{:T(128)} constant(7)
      ROOT %lt = pred[] compare(%i, %bound), direction=LT
    }

    %fused.1 (p: bf16[8]) -> bf16[64] {
      ROOT %g1 = bf16[64]{0:T(8,128)(2,1)} all-gather(%p), channel_id=5, dimensions={0}
    }

    %fused.2 (p: bf16[8]) -> bf16[64] {
      ROOT %g2 = bf16[64]{0} all-gather(%p), channel_id=5, dimensions={0}
    }

    %body.1 (p: (s32[], f32[4])) -> (s32[], f32[4]) {
      %hidden = bf16[64]{0} fusion(%p), kind=kLoop, calls=%fused.2
      ROOT %r = f32[3]{0} all-reduce(%x), channel_id=6, to_apply=%add
    }

    %never (p: f32[]) -> f32[] {
      ROOT %s = f32[9]{0} all-reduce(%x), channel_id=9, to_apply=%add
    }

    ENTRY %main (p: f32[64]) -> f32[64] {
      %a = f32[64,12]{1,0} all-gather(%x), replica_groups={}
      %b = (bf16[8]{0}, bf16[64]{0}) all-gather-start(%y), dimensions={0}
      %c = bf16[64]{0} all-gather-done(%b)
      %d = (f32[3]{0}, f32[], /*index=2*/pred[5]{0}) all-reduce(%p, %q), to_apply=%add
      %e = f32[2,5]{1,0} fusion(%d), calls=%fused.1
      %w = (s32[], f32[4]) while(%t), condition=%condition.1, body=%body.1
      ROOT %f = f32[2,5]{1,0} fusion(%d), calls=%all-reduce-like
    }
    """)


def test_collectives_are_counted_and_weighed():
    found = hlo.collectives(TEXT)
    assert set(found) == {"all-gather", "all-reduce"}
    # Two in the open and one in two parts, of which only one is in the loop.
    assert found["all-gather"] == (3, 64 * 12 * 4 + 128 + 128, 64 * 12 * 4)
    # A tuple of 12 + 4 + 5 bytes, and 12 bytes in each of seven rounds.
    assert found["all-reduce"] == (8, 21 + 7 * 12, 21)


def test_a_program_without_devices_sends_nothing():
    text = jax.jit(jnp.sin).lower(jnp.ones(3)).compile().as_text()
    assert hlo.collectives(text) == {}


@pytest.mark.parametrize("rounds", [1, 5])
def test_a_compiled_loop_of_sums_is_counted_round_by_round(rounds):
    mesh = Mesh(np.asarray(jax.devices()[:4]), "d")

    def step(x):
        def round_(carry, _):
            return jnp.cos(carry + jax.lax.psum(carry, "d")), None

        return jax.lax.scan(round_, x, length=rounds)[0]

    split = jax.shard_map(step, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    text = jax.jit(split).lower(jnp.ones(12)).compile().as_text()
    assert hlo.collectives(text)["all-reduce"] == (rounds, 12 * rounds, 12)
