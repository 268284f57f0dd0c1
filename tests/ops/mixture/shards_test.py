import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from softbottle.ops.mixture import likelihood, shards
from softbottle.ops.mixture.activations import SIGSOFTMAX
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import Options

RNG = np.random.default_rng(0)
CONTEXT_TKE = RNG.normal(size=(5, 3, 7)).astype(np.float32)
TABLE_VE = RNG.normal(size=(16, 7)).astype(np.float32)
BIAS_V = RNG.normal(size=16).astype(np.float32)
LABELS_T = np.array([0, 15, 8, 12, 3], np.int32)
OPTIONS = Options(vocab=13, vocab_axis="model")


def over_model(function, *specs, out):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))


def test_logits_are_products_plus_bias():
    context_TKE, *vocabulary = map(jnp.asarray, (CONTEXT_TKE, TABLE_VE, BIAS_V))
    z_TKV = likelihood.logits(context_TKE, Vocabulary(*vocabulary), Options())
    exact = CONTEXT_TKE.astype(np.float64) @ TABLE_VE.T.astype(np.float64) + BIAS_V
    np.testing.assert_allclose(z_TKV, exact, atol=1e-5)


def test_rows_beyond_the_vocabulary_are_not_live():
    np.testing.assert_array_equal(
        shards.live_rows(16, Options(vocab=13)), np.arange(16) < 13
    )


def test_each_shard_knows_its_own_live_rows():
    live = over_model(lambda: shards.live_rows(2, OPTIONS), out=P("model"))()
    np.testing.assert_array_equal(live, np.arange(16) < 13)


def test_normalisers_of_shards_combine_to_that_of_the_whole():
    g_TV = 50 * RNG.normal(size=(5, 16)).astype(np.float32)
    g_TV[:, 14:] = -np.inf  # the last shard is nothing but padding

    def both(g_TW):
        local_T1 = jax.nn.logsumexp(g_TW, axis=1, keepdims=True)
        return shards.joint_lse(local_T1, OPTIONS)

    lse_T1 = over_model(both, P(None, "model"), out=P())(g_TV)
    exact = np.logaddexp.reduce(g_TV.astype(np.float64), axis=1)
    np.testing.assert_allclose(lse_T1[:, 0], exact, rtol=1e-6)


@pytest.mark.parametrize("split", [False, True])
def test_the_score_of_a_label_is_its_activated_logit_and_nan_for_no_word(split):
    def score(context_TKE, table_VE, bias_V, labels_T):
        options = OPTIONS if split else Options(vocab=13)
        vocabulary = Vocabulary(table_VE, bias_V)
        return likelihood.target_score(
            context_TKE, vocabulary, labels_T, SIGSOFTMAX, options
        )

    rows = (P("model"), P("model"))
    function = over_model(score, P(), *rows, P(), out=P()) if split else jax.jit(score)
    score_TK = function(CONTEXT_TKE, TABLE_VE, BIAS_V, LABELS_T)
    z_TKV = CONTEXT_TKE.astype(np.float64) @ TABLE_VE.T.astype(np.float64) + BIAS_V
    z_TK = z_TKV[np.arange(5), :, LABELS_T]
    exact = z_TK - np.log1p(np.exp(-z_TK))
    exact[1] = np.nan  # 15 is a row of the table and no word of the vocabulary
    np.testing.assert_allclose(score_TK, exact, atol=1e-5)
