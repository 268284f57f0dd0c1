"""What a head passes on of the logits' gradient, against explicit least squares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.analysis import report
from softbottle.analysis.capture import Capture
from softbottle.analysis.instruments import gradient
from softbottle.analysis.settings import Settings
from softbottle.analysis.sources import run as source
from softbottle.ops.mixture import activations
from tests import pictures, tiny

TOKENS, COMPONENTS, WIDTH, WORDS = 41, 3, 5, 31


def make_inputs(components=COMPONENTS, width=WIDTH, seed=0):
    random = np.random.default_rng(seed)
    log_prior_TK = np.log(random.dirichlet(np.ones(components), TOKENS))
    context_TKE = random.standard_normal((TOKENS, components, width))
    table_VE = random.standard_normal((WORDS, width))
    labels_T = random.integers(WORDS, size=TOKENS)
    return log_prior_TK, context_TKE, table_VE, random.standard_normal(WORDS), labels_T


def softmax(z):
    return np.exp(z) / np.exp(z).sum()


def gradients(log_prior_TK, context_TKE, table_VE, bias_V, labels_T, bent=False):
    """r_k (p_k - onehot) g'(z_k), one token and component after another: [T, K, V]."""
    d_TKV = np.zeros((*log_prior_TK.shape, len(table_VE)))
    for t, label in enumerate(labels_T):
        z_KV = context_TKE[t] @ table_VE.T + bias_V
        sigmoid_KV = 1 / (1 + np.exp(-z_KV))
        g_KV = z_KV + np.log(sigmoid_KV) if bent else z_KV
        p_KV = np.array([softmax(g_V) for g_V in g_KV])
        joint_K = np.exp(log_prior_TK[t]) * p_KV[:, label]
        d_TKV[t] = (joint_K / joint_K.sum())[:, None] * (p_KV - np.eye(WORDS)[label])
        d_TKV[t] *= (2 - sigmoid_KV) if bent else 1
    return d_TKV


def least_squares(table_VE, d_V):
    """|W x - d| least: the fitted part of d."""
    return table_VE @ np.linalg.lstsq(table_VE, d_V, rcond=None)[0]


@pytest.mark.parametrize(
    "components, bent", [(1, False), (COMPONENTS, False), (COMPONENTS, True)]
)
def test_what_is_kept_is_the_fit_of_least_squares(components, bent):
    inputs = make_inputs(components)
    activation = activations.SIGSOFTMAX if bent else activations.SOFTMAX
    found = gradient.measure(*inputs, activation)
    d_TKV = gradients(*inputs, bent)
    fitted_TKV = np.array(
        [[least_squares(inputs[2], d_V) for d_V in d_KV] for d_KV in d_TKV]
    )
    norm = np.linalg.norm
    kept_T = [norm(f) / norm(d) for f, d in zip(fitted_TKV, d_TKV, strict=True)]
    np.testing.assert_allclose(found.kept_T, kept_T, rtol=1e-4)
    assert found.kept == pytest.approx(norm(fitted_TKV) / norm(d_TKV), rel=1e-4)
    rest = norm(d_TKV - fitted_TKV) / norm(d_TKV)
    assert found.suppressed == pytest.approx(rest, rel=1e-4)
    for k, kept in enumerate(found.kept_K):
        expected = norm(fitted_TKV[:, k]) / norm(d_TKV[:, k])
        assert kept == pytest.approx(expected, rel=1e-4)
    assert found.responsibility_K.sum() == pytest.approx(1, rel=1e-5)
    assert found.width == WIDTH and found.vocab == WORDS


def test_the_softmax_gradient_is_that_of_autodiff():
    log_prior_TK, context_TKE, table_VE, bias_V, labels_T = make_inputs(1)
    logits_TV = jnp.asarray(context_TKE[:, 0] @ table_VE.T + bias_V)

    def nll(logits_TV):
        return -jax.nn.log_softmax(logits_TV)[jnp.arange(TOKENS), labels_T].sum()

    d_TV = np.asarray(jax.grad(nll)(logits_TV), np.float64)
    basis_VE = gradient.column_space(table_VE)
    expected = np.linalg.norm(d_TV @ basis_VE) / np.linalg.norm(d_TV)
    found = gradient.measure(log_prior_TK, context_TKE, table_VE, bias_V, labels_T)
    assert found.kept == pytest.approx(expected, rel=1e-5)


def test_the_interval_is_of_the_tokens_windows_and_closes_where_they_are_alike():
    inputs = make_inputs()
    found = gradient.measure(*inputs)
    low, high = found.interval
    assert low < found.kept < high
    # By hand: ratios of sums over 20 windows of two tokens, the last of three.
    d_TKV = gradients(*inputs)
    basis_VE = gradient.column_space(inputs[2])
    part_T = np.square(d_TKV @ basis_VE).sum(axis=(1, 2))
    whole_T = np.square(d_TKV).sum(axis=(1, 2))
    rng, draws = np.random.default_rng(5), []
    windows = [*(slice(at, at + 2) for at in range(0, 38, 2)), slice(38, None)]
    for _ in range(2000):
        drawn = [windows[at] for at in rng.integers(len(windows), size=len(windows))]
        part, whole = (sum(a_T[w].sum() for w in drawn) for a_T in (part_T, whole_T))
        draws.append(np.sqrt(part / whole))
    reach = 2.093 * np.std(draws) * np.sqrt(20 / 19)  # Student's t of 19
    assert high - low == pytest.approx(2 * reach, rel=0.1)
    prior, context, table, bias, labels = inputs
    alike = (np.repeat(a[:1], TOKENS, axis=0) for a in (prior, context))
    found = gradient.measure(*alike, table, bias, np.repeat(labels[:1], TOKENS))
    np.testing.assert_allclose(found.interval, found.kept, rtol=1e-6)


def test_chunks_of_tokens_change_nothing(monkeypatch):
    inputs = make_inputs()
    whole = gradient.measure(*inputs)
    monkeypatch.setattr(gradient, "CHUNK", 16)
    parts = gradient.measure(*inputs)
    np.testing.assert_allclose(parts.kept_T, whole.kept_T, rtol=1e-5)
    assert parts.kept == pytest.approx(whole.kept, rel=1e-5)


def test_a_head_as_wide_as_the_vocabulary_keeps_everything():
    found = gradient.measure(*make_inputs(1, WORDS))
    assert found.kept == pytest.approx(1, abs=1e-5)
    assert found.suppressed < 1e-2 and found.chance == 1


def test_leading_directions_keep_more_the_more_there_are():
    inputs = make_inputs()
    found = gradient.measure(*inputs, ranks=[1, 3, WIDTH])
    d_V = gradients(*inputs).reshape(-1, WORDS)
    left_VE, _, _ = np.linalg.svd(inputs[2], full_matrices=False)
    for rank, kept in found.by_rank.items():
        expected = np.linalg.norm(d_V @ left_VE[:, :rank]) / np.linalg.norm(d_V)
        assert kept == pytest.approx(expected, rel=1e-4)
    assert found.by_rank[WIDTH] == pytest.approx(found.kept)


def test_a_table_of_repeated_columns_is_no_wider_than_they_span():
    prior, context_TKE, table_VE, *rest = make_inputs()
    table_VE[:, 3:] = table_VE[:, :2]
    assert gradient.measure(prior, context_TKE, table_VE, *rest).width == 3


def test_an_idle_component_has_nothing_to_keep():
    log_prior_TK, *rest = make_inputs()
    log_prior_TK[:, 1] = -1e4
    found = gradient.measure(log_prior_TK, *rest)
    assert np.isnan(found.kept_K).tolist() == [False, True, False]
    assert np.isfinite(found.kept) and found.responsibility_K[1] == 0


def test_a_component_that_is_not_active_is_idle():
    log_prior_TK, *rest = make_inputs()
    log_prior_TK[:, 1] = -np.inf
    found = gradient.measure(log_prior_TK, *rest)
    assert np.isnan(found.kept_K).tolist() == [False, True, False]
    assert np.isfinite(found.kept) and found.responsibility_K[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, width, rank", [(11, 40, 10), (80, 70, 3), (80, 70, 70)]
)
def test_a_table_of_fewer_directions_than_columns_is_measured(words, width, rank):
    random = np.random.default_rng(0)
    table_VE = random.normal(size=(words, rank)) @ random.normal(size=(rank, width))
    states_ND = random.normal(size=(50, width)).astype("float32")
    labels_N = random.integers(0, words, 50)
    capture = Capture.from_states(states_ND, table_VE, labels=labels_N)
    found = gradient.of_capture(capture, Settings())
    assert found.width == rank and max(found.by_rank) == rank
    assert found.by_rank[rank] == pytest.approx(found.kept)


def test_ranks_above_the_width_are_refused():
    with pytest.raises(ValueError, match=r"\[1, 5\], got \[2, 6\]"):
        gradient.measure(*make_inputs(), ranks=[2, 6])
    with pytest.raises(ValueError, match=r"got \[0\]"):
        gradient.measure(*make_inputs(), ranks=[0])


def test_arrays_that_do_not_fit_are_refused():
    prior, context, table, bias, labels = make_inputs()
    with pytest.raises(ValueError, match=r"\(31, 4\)"):
        gradient.measure(prior, context, table[:, :4], bias, labels)
    with pytest.raises(ValueError, match=r"\(40,\)"):
        gradient.measure(prior, context, table, bias, labels[1:])
    with pytest.raises(ValueError, match=r"\(41, 5\)"):
        gradient.measure(prior, context[:, 0], table, bias, labels)
    labels[3] = WORDS
    with pytest.raises(ValueError, match="label 31 is not among 31"):
        gradient.measure(prior, context, table, bias, labels)
    table[2, 3] = np.nan
    with pytest.raises(ValueError, match="table have 1 entries"):
        gradient.measure(prior, context, table, bias, labels)
    prior, context, table, bias, labels = make_inputs()
    bias[:2] = np.nan
    with pytest.raises(ValueError, match="bias have 2 entries"):
        gradient.measure(prior, context, table, bias, labels)
    prior[4] = -np.inf
    with pytest.raises(ValueError, match="log-weights have 3 entries"):
        gradient.measure(prior, context, table, np.zeros(WORDS), labels)


@pytest.mark.slow
def test_a_run_is_measured_through_its_own_head(tmp_path, monkeypatch):
    run, corpus = tiny.make_narrow_run(
        "mos", COMPONENTS, WORDS, WIDTH, model__vocab_multiple=8
    )
    prior_TK, context_TKE, labels_T, activation, _ = source.mixed(run, corpus.test, 99)
    _, table_VE, bias_V = run.model.output(run.params)
    found = gradient.measure(
        *(prior_TK, context_TKE, table_VE[:WORDS], bias_V[:WORDS], labels_T),
        *(activation, [2]),
    )
    assert found.kept_T.shape == (99,) and found.kept_K.shape == (COMPONENTS,)
    assert found.vocab == WORDS and 0 < found.by_rank[2] < found.kept < 1
    section = gradient.section(
        {"mos": found, "softmax": gradient.measure(*make_inputs(1))}
    )
    assert f"{found.kept:.1%} of the norm" in section.reading
    low, high = found.interval
    (row, _) = section.tables[0].rows
    assert row[1] == f"{found.kept:.1%} ({low:.1%} to {high:.1%})"
    assert "bootstrap over" in section.remarks and section.remarks in section.reading
    pictures.lay_out_only(monkeypatch)
    report.write(tmp_path, "Heads", [section])
