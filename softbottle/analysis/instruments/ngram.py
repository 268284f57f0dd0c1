"""How many dimensions the next word of a corpus needs, with no model at all.

W[c, v] is the share of the occurrences of context c that word v follows, for every run
c of n - 1 words that the corpus holds, and

    W-error(d) = ||sigma_{d+1:}||_2 / ||W||_F,
    W-error(d)^2 = 1 - sum_{i<=d} sigma_i^2 / ||W||_F^2,

is the relative error of the best approximation of rank d (Godey, de la Clergerie and
Sagot, 2024, who weight all contexts alike). ||W||_F is exact, so only the first sigma_i
are needed. They come from a subspace iteration on G = W'W: with an orthonormal basis Q
of it, A = Q'GQ has eigenvalues theta_i <= sigma_i^2 (Cauchy), so that the error given
is never too small. How much too large it may be follows from

    G = [[A, B'], [B, C]]  in the basis (Q, its complement),    ||B|| = ||GQ - QA||,
    sum_{i<=d} sigma_i^2(W) <= sum of the d largest of {theta} and {eig C}
                               + sum of the d largest singular values of B  (Ky Fan).

The trace of C is known; its norm is bounded with probability 1 - 1e-10 by ten Gaussian
probes, ||C^32|| <= 10 sqrt(2/pi) max_i ||C^32 g_i|| (Halko, Martinsson and Tropp, 2011,
Lemma 4.1). All this squares the sigma_i: a W-error below 1e-7 is rounding.

Axes: C contexts, N words of a context, D dimensions, K columns of Q, P probes, R rows
of a smaller matrix with the same G.
"""

from typing import NamedTuple

import numpy as np
from scipy import sparse

from softbottle import drawing
from softbottle.analysis import report
from softbottle.analysis.capture import Capture, Text, present
from softbottle.analysis.settings import Settings

ABOUT = report.About(
    "How much of the text's own table of which word follows which is lost if that "
    "table is cut to a number of dimensions.",
    "Hold your model's width against the line: where it still falls steeply, the text "
    "asks for more dimensions than the model has, which is a hint and no bound on its "
    "loss.",
    "Dimensions of a text",
)
_FEW = 3  # models up to which they are named with their text
_PASSES = 6
_OVERSAMPLING = 16
_PROBES = 10
_PROBE_POWER = 32
_BLOCK_BYTES = 1 << 28


class NextWord(NamedTuple):
    """The contextual next-word matrix of a corpus.

    Attributes:
        matrix_CV: one row for each distinct context, which sums to one.
        contexts_CN: the n - 1 ids of each context, in the order of the rows.
        counts_C: how often each context occurs.
    """

    matrix_CV: sparse.csr_array
    contexts_CN: np.ndarray
    counts_C: np.ndarray


class Reader(NamedTuple):
    """A text as it is to be counted, and the width of the model that reads it.

    The width is None where there is no model.
    """

    text: Text
    width: int | None
    settings: Settings


class WError(NamedTuple):
    """W-error at dimension 0, 1, 2, ... and what it was computed from.

    Attributes:
        error_D: never below the truth, but for rounding.
        lower_D: never above the truth, with probability 1 - 1e-10.
        sigma: the singular values computed, each at most the true one.
        frobenius: ||W||_F.
        contexts: rows of W.
        vocab: columns of W.
    """

    error_D: np.ndarray
    lower_D: np.ndarray
    sigma: np.ndarray
    frobenius: float
    contexts: int
    vocab: int


def next_word(ids: np.ndarray, vocab: int, order: int) -> NextWord:
    """The next-word distribution of every context of `order` - 1 words.

    Args:
        ids: a run of ids, such as a split of a `Corpus`.
        vocab: ids are below it.
        order: n, 2 or more; 5 in the literature.

    Raises:
        ValueError: if the order is below 2, the run is shorter than it, or an id is
            not in the vocabulary.
    """
    ids = np.asarray(ids)
    if order < 2:
        raise ValueError(f"order must be >= 2, got {order}.")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"ids must be integers with one axis, got {ids.dtype} of shape {ids.shape}."
        )
    if len(ids) < order:
        raise ValueError(f"a corpus of {len(ids)} ids is shorter than n = {order}.")
    if ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(f"ids must lie in [0, {vocab}), got {ids.min()}..{ids.max()}.")
    last = len(ids) - order + 1
    context_T = np.zeros(last, np.int64)
    for column in range(order - 1):
        # Numbers stay below the number of positions, so no product overflows.
        key_T = context_T * vocab + ids[column : column + last]
        _, first_C, context_T = np.unique(key_T, return_index=True, return_inverse=True)
    pair, counts = np.unique(context_T * vocab + ids[order - 1 :], return_counts=True)
    row, word = np.divmod(pair, vocab)
    counts_C = np.bincount(context_T)
    shape = len(counts_C), vocab
    matrix_CV = sparse.csr_array((counts / counts_C[row], (row, word)), shape=shape)
    contexts_CN = ids[first_C[:, None] + np.arange(order - 1)[None, :]]
    return NextWord(matrix_CV, contexts_CN, counts_C)


def w_error(
    matrix_CV: sparse.sparray | np.ndarray, dimensions: int, seed: int = 0
) -> WError:
    """W-error of a matrix at 0 to `dimensions` dimensions, with its error bound.

    Raises:
        ValueError: if the matrix is not finite with two axes and something in it, or
            there are not that many dimensions.
    """
    if np.iscomplexobj(matrix_CV):
        raise ValueError(f"the matrix must be real, got {matrix_CV.dtype}.")
    matrix_CV = sparse.csr_array(matrix_CV, dtype=np.float64)
    wrong = int(np.sum(~np.isfinite(matrix_CV.data)))
    if matrix_CV.ndim != 2 or wrong or not np.any(matrix_CV.data):
        raise ValueError(
            f"the matrix must be finite, not zero, with two axes; got the shape "
            f"{matrix_CV.shape} with {wrong} entries not finite."
        )
    most = min(matrix_CV.shape)
    if not 1 <= dimensions <= most:
        raise ValueError(f"dimensions must lie in [1, {most}], got {dimensions}.")
    rng = np.random.default_rng(seed)
    small_RV = _merged(matrix_CV)
    basis_VK = _leading_basis(small_RV, dimensions + _OVERSAMPLING, rng)
    image_VK = _gram(small_RV, basis_VK)
    inner_KK = basis_VK.T @ image_VK
    theta_K = np.clip(np.linalg.eigvalsh(inner_KK)[::-1], 0, None)
    energy = float(np.sum(matrix_CV.data**2))
    coupling_K = np.linalg.svd(image_VK - basis_VK @ inner_KK, compute_uv=False)
    ceiling = _complement_norm(small_RV, basis_VK, rng)
    most_D = _most_energy(theta_K, coupling_K, ceiling, energy)
    return WError(
        _tail(np.cumsum(theta_K)[:dimensions], energy),
        _tail(most_D[:dimensions], energy),
        np.sqrt(theta_K[:dimensions]),
        float(np.sqrt(energy)),
        *matrix_CV.shape,
    )


def section(
    errors: dict[str, WError], widths: dict[str, dict[str, int]] | None = None
) -> report.Section:
    """W-error against dimension, corpora side by side.

    Args:
        errors: by the corpus's name.
        widths: by the corpus's name, the widths of models that read it, by theirs.
    """
    figure = drawing.Figure(figsize=(6.4, 4.0))
    axes = figure.subplots()
    numbers, halves, models, rows = {}, [], [], []
    for name, error in errors.items():
        dims_D, above_D = np.arange(1, len(error.error_D)), error.error_D[1:]
        label = name if len(errors) > 1 else None
        (line,) = axes.plot(dims_D, above_D, label=label)
        axes.fill_between(
            dims_D, error.lower_D[1:], above_D, color=line.get_color(), alpha=0.25
        )
        half = _first_below(error.error_D, 0.5)
        halves.append(
            f"{name}: {'beyond' if half is None else 'at'} "
            f"{len(dims_D) if half is None else half:,}"
        )
        numbers[name] = {**error._asdict(), "half_at": half}
        half_at = f"beyond {len(dims_D):,}" if half is None else f"{half:,}"
        beside: dict[str, int | None] = {**(widths or {}).get(name, {})}
        rows += [
            (
                *(model, "–" if width is None else f"{width:,}"),
                *(_shown(error.error_D, width), name, half_at),
            )
            for model, width in (beside or {"–": None}).items()
        ]
        for model, width in (widths or {}).get(name, {}).items():
            if width < len(error.error_D):
                axes.plot(width, error.error_D[width], "o", color=line.get_color())
                axes.axvline(width, color=line.get_color(), ls="--", lw=1)
                clause = (
                    f"at {width:,}, the width of {model}, {error.error_D[width]:.3f}"
                )
                models.append(clause)
                numbers[name][f"at the width of {model}"] = error.error_D[width]
    axes.axhline(0.5, color=drawing.GRAY, linestyle=":", linewidth=1)
    axes.set(xlabel="dimensions", ylabel="W-error", ylim=(0, 1.02), xscale="log")
    drawing.plain(axes.xaxis)
    drawing.label(axes)
    remarks = (
        "How much of the text's own next-word table the best table of a given rank "
        "leaves out: what the text asks for, not what a model loses, since it is a "
        "softmax's log-probabilities whose rank is limited."
    )
    reading = (
        f"{remarks} The error is halved at these numbers of dimensions: "
        f"{'; '.join(halves)}."
    )
    if models:
        reading += f" It is {'; '.join(models)}."
    caption = (
        "Each line falls from 1, at no dimensions, towards 0, where the table is "
        "exact. A shade below a line is how far the truth may lie under it. Dotted: "
        "half of the error."
    )
    if len(errors) == 1:
        caption = caption.replace("Each line", "The line").replace("a line", "it", 1)
    if models:
        caption += " Dashed: the width of a model."
    figures = [report.Figure("ngram-w-error", figure, caption)]
    heads = ("model", "its width", "error there", "text", "error halved at")
    first = 0 if any((widths or {}).values()) else 3
    return report.Section(
        "Dimensions of the text",
        reading,
        figures,
        numbers,
        tables=[report.Table(heads[first:], [row[first:] for row in rows])],
        remarks=remarks,
    )


def of_capture(capture: Capture, settings: Settings) -> Reader:
    """Who reads which text; it is counted later, once for all models that read it."""
    table_VE = capture.table_VE
    width = None if table_VE is None else table_VE.shape[1]
    return Reader(present("text", capture.text), width, settings)


def compare(readers: dict[str, Reader]) -> report.Section:
    """One line per text: models that read the same one share it."""
    groups: dict[str | int, dict[str, Reader]] = {}
    for name, reader in readers.items():
        key = name if reader.width is None else hash(reader.text.ids.tobytes())
        groups.setdefault(key, {})[name] = reader
    errors, widths = {}, {}
    for group in groups.values():
        # The widest model's, so that the line reaches every width.
        reader = max(group.values(), key=lambda reader: reader.text.dimensions)
        named, more = [*group][:_FEW], len(group) - _FEW
        readers_of = ", ".join(named) + (f" and {more} more" if more > 0 else "")
        title = reader.text.title.format(readers_of)
        errors[title] = _of_text(reader.text, reader.settings)
        widths[title] = {
            name: reader.width
            for name, reader in group.items()
            if reader.width is not None
        }
    compared = section(errors, widths)
    if any(widths.values()):
        return compared
    # Texts without a model are cut to one length and one number of words.
    texts = [reader.text for reader in readers.values()]
    text = texts[0]
    if max(len(np.unique(text.ids)) for text in texts) < text.vocab:
        apart = "all of them told apart"
    else:
        apart = f"the {text.vocab - 1:,} most frequent ones told apart"
    sample = f" Of each text the first {len(text.ids):,} words, {apart}."
    return compared._replace(
        reading=compared.reading + sample,
        remarks=(compared.remarks or "") + sample,
        numbers=compared.numbers | {"words": len(text.ids)},
    )


def _of_text(text, settings):
    matrix_CV = next_word(text.ids, text.vocab, settings.order).matrix_CV
    most = settings.dimensions or text.dimensions
    return w_error(matrix_CV, min(most, *matrix_CV.shape))


def _merged(matrix_CV):
    """A smaller matrix of the same G: rows with one entry are added up by column."""
    single_C = np.diff(matrix_CV.indptr) == 1
    lone = matrix_CV[single_C]
    weight_V = np.bincount(lone.indices, lone.data**2, minlength=matrix_CV.shape[1])
    diagonal_VV = sparse.diags_array(np.sqrt(weight_V))
    return sparse.vstack([matrix_CV[~single_C], diagonal_VV], format="csr")


def _leading_basis(matrix_CV, columns, rng):
    """An orthonormal basis near the first right singular vectors."""
    vocab = matrix_CV.shape[1]
    basis_VK = rng.normal(size=(vocab, min(columns, vocab)))
    for _ in range(_PASSES):
        basis_VK = _gram(matrix_CV, np.linalg.qr(basis_VK).Q)
    return np.linalg.qr(basis_VK).Q


def _gram(matrix_CV, basis_VK):
    """W'(W Q), a few columns at a time, so that no C x K array exists."""
    columns = max(1, _BLOCK_BYTES // (8 * matrix_CV.shape[0]))
    transposed = matrix_CV.T.tocsr()
    blocks = [
        transposed @ (matrix_CV @ basis_VK[:, start : start + columns])
        for start in range(0, basis_VK.shape[1], columns)
    ]
    return np.concatenate(blocks, axis=1)


def _complement_norm(matrix_CV, basis_VK, rng):
    """A bound on the norm of G outside the basis."""
    probe_VP = rng.normal(size=(basis_VK.shape[0], _PROBES))
    probe_VP -= basis_VK @ (basis_VK.T @ probe_VP)
    log_size = np.log(10 * np.sqrt(2 / np.pi))
    for _ in range(_PROBE_POWER):
        probe_VP = _gram(matrix_CV, probe_VP)
        probe_VP -= basis_VK @ (basis_VK.T @ probe_VP)
        largest = np.linalg.norm(probe_VP, axis=0).max()
        if largest == 0:
            return 0.0
        # One scale for all probes: which of them is largest must not change.
        probe_VP, log_size = probe_VP / largest, log_size + np.log(largest)
    return float(np.exp(log_size / _PROBE_POWER))


def _most_energy(theta_K, coupling_K, ceiling, energy):
    """The most that the first 1, 2, ... squared singular values can sum to."""
    rest = max(energy - theta_K.sum(), 0.0)
    copies = len(theta_K) if ceiling * len(theta_K) <= rest else int(rest / ceiling)
    outside = [ceiling] * copies + [rest - copies * ceiling] * (copies < len(theta_K))
    candidates = np.sort(np.concatenate([theta_K, outside]))[::-1][: len(theta_K)]
    return np.cumsum(candidates) + np.cumsum(coupling_K)


def _tail(sums_D, energy):
    return np.sqrt(np.clip(1 - np.concatenate([[0.0], sums_D]) / energy, 0, 1))


def _shown(error_D, width):
    """The error at a width, for a table; a dash where it is not known."""
    known = width is not None and width < len(error_D)
    return f"{error_D[width]:.3f}" if known else "–"


def _first_below(error_D, level):
    below_D = error_D <= level
    return int(np.argmax(below_D)) if below_D.any() else None
