"""What papers report, by data set, head and line of a table, each with its source.

A value is as it is printed, with its deviation over seeds where there is one. Numbers
of which no text was at hand are not here.
"""

YANG = "Yang et al. 2018 (arXiv:1711.03953)"
MERITY = f"Merity et al. 2018, quoted by {YANG}"
KRAUSE = f"Krause et al. 2018, quoted by {YANG}"
# 11 seeds, averaging from epoch 200, no finetuning.
STUDY = "Parthiban et al. 2021 (doi:10.1609/aaai.v35i15.17608)"
ONE_SEED = f"{STUDY}, one seed"
TRIGGERED = f"{STUDY}, one seed, averaging by the non-monotone trigger"
MATCHED = f"{STUDY}, equal parameters and batches"
TIMED = f"{STUDY}, on a V100, batches of each head's recipe"

_ALL = "valid test fine_valid fine_test"
_SHORT = "valid test rank"
# Source, head, lines, and their values by data set; a dash where there is none. A
# value has no space, and an underscore for one.
_PTB_AND_WT2 = (
    (MERITY, "softmax", _ALL, "60.7 58.8 60.0 57.3", "69.1 66.0 68.6 65.8"),
    (MERITY, "softmax", "cache", "52.8", "52.0"),
    (KRAUSE, "softmax", "dynamic", "51.1", "44.3"),
    (YANG, "mos", _ALL, "58.08 55.97 56.54 54.44", "66.01 63.33 63.88 61.45"),
    (YANG, "mos", "dynamic rank", "47.69 9,981", "40.68 -"),
    (YANG, "moc", _SHORT, "59.82 57.55 280", "68.76 65.98 -"),
    (YANG, "softmax", "rank", "400", "-"),
    (YANG, "mos-3", "test rank", "58.62 6,467", "- -"),
    (YANG, "mos-5", "test rank", "57.36 8,930", "- -"),
    (YANG, "mos-10", "test rank", "56.33 9,973", "- -"),
    (YANG, "mos-20", "test rank", "56.17 9,981", "- -"),
    (STUDY, "softmax", "valid test", "59.55±0.12 57.08±0.09", "67.57±0.14 64.63±0.08"),
    (STUDY, "softmax", "rank", "402±0", "402±0"),
    (STUDY, "sigsoftmax", "valid", "59.69±0.15", "67.28±0.16"),
    (STUDY, "sigsoftmax", "test rank", "57.05±0.15 5,113±85", "64.35±0.17 6,634±46"),
    (STUDY, "gss", "valid", "59.51±0.13", "67.35±0.22"),
    (STUDY, "gss", "test rank", "57.00±0.14 8,904±57", "64.50±0.13 10,122±72"),
    (STUDY, "plif", "valid", "59.08±0.09", "67.15±0.21"),
    (STUDY, "plif", "test rank", "56.80±0.11 496±83", "64.16±0.17 524±74"),
    (STUDY, "mos", "valid", "57.14±0.26", "64.54±0.36"),
    (STUDY, "mos", "test rank", "54.91±0.26 9,981±2", "61.96±0.40 15,734±188"),
    (ONE_SEED, "moc", "test rank", "55.81 282", "65.83 302"),
    (MATCHED, "mos-280", "test", "56.39±0.19", "-"),
    (MATCHED, "softmax-340", "test", "56.45±0.10", "-"),
    (TRIGGERED, "mos-1", "test rank", "64.50 282", "- -"),
    (TRIGGERED, "mos-3", "test rank", "59.25 5,575", "- -"),
    (TRIGGERED, "mos-5", "test rank", "58.38 8,057", "- -"),
    (TRIGGERED, "mos-10", "test rank", "56.21 9,976", "63.62 12,198"),
    (TRIGGERED, "mos-20", "test rank", "56.19 9,980", "62.76 13,998"),
)
_LM1B = (
    (YANG, "softmax", "valid test", "- 42.77"),
    (YANG, "mos", "valid test", "38.01 37.10"),
)
_TIME = (
    (TIMED, "softmax", "ptb wt2", "55_s_per_epoch 72_s_per_epoch"),
    (TIMED, "sigsoftmax", "ptb wt2", "57_s_per_epoch 83_s_per_epoch"),
    (TIMED, "gss", "ptb wt2", "58_s_per_epoch 87_s_per_epoch"),
    (TIMED, "plif", "ptb wt2", "59_s_per_epoch 93_s_per_epoch"),
    (TIMED, "mos", "ptb wt2", "100_s_per_epoch 600_s_per_epoch"),
)
# The lines of each data set, and the place of its values among theirs.
_SETS = {
    "ptb": (_PTB_AND_WT2, 0),
    "wt2": (_PTB_AND_WT2, 1),
    "lm1b": (_LM1B, 0),
    "time": (_TIME, 0),
}


def find(data: str, head: str, line: str) -> list[tuple[str, str]]:
    """(value, source) of what is published; none where nothing is."""
    rows, place = _SETS[data]
    found = []
    for source, name, keys, *values in rows:
        known = dict(zip(keys.split(), values[place].split(), strict=True))
        if name == head and known.get(line, "-") != "-":
            value = known[line].replace("±", " ± ").replace("_", " ")
            found.append((value, source))
    return found
