"""What papers report, by data set, head and line of a table, each with its source.

A value is as it is printed, with its deviation over seeds where there is one. Numbers
of which no text was at hand are not here.
"""

YANG = "Yang et al. 2018 (arXiv:1711.03953)"
MERITY = f"Merity et al. 2018, quoted by {YANG}"
KRAUSE = f"Krause et al. 2018, quoted by {YANG}"
# 11 seeds, averaging from epoch 200, no finetuning.
PARTHIBAN = "Parthiban et al. 2021 (doi:10.1609/aaai.v35i15.17608)"
ONE_SEED = f"{PARTHIBAN}, one seed"
TRIGGERED = f"{PARTHIBAN}, one seed, averaging by the non-monotone trigger"
MATCHED = f"{PARTHIBAN}, equal parameters and batches"
EPOCH = f"{PARTHIBAN}, V100, batches of its own"

Published = tuple[tuple[str, str], ...]
_ByHead = dict[str, dict[str, Published]]


def _perplexities(valid, test, source, *more):
    """Lines "valid" and "test" of one source, and of others after it."""
    triples = ((valid, test, source), *more)
    return {
        "valid": tuple((valid, source) for valid, _, source in triples if valid),
        "test": tuple((test, source) for _, test, source in triples if test),
    }


def _by_components(*lines):
    """Of mos-K: K, (test, rank) of Yang et al., (test, rank) of Parthiban et al."""
    found = {}
    for components, *pairs in lines:
        sources = ((YANG, TRIGGERED), pairs)
        known = [(source, pair) for source, pair in zip(*sources, strict=True) if pair]
        found[f"mos-{components}"] = {
            line: tuple((pair[place], source) for source, pair in known)
            for place, line in enumerate(("test", "rank"))
        }
    return found


_PTB: _ByHead = {
    "softmax": {
        **_perplexities(
            *("60.7", "58.8", MERITY), ("59.55 ± 0.12", "57.08 ± 0.09", PARTHIBAN)
        ),
        "fine_valid": (("60.0", MERITY),),
        "fine_test": (("57.3", MERITY),),
        "dynamic": (("51.1", KRAUSE),),
        "cache": (("52.8", MERITY),),
        "rank": (("400", YANG), ("402", PARTHIBAN)),
    },
    "moc": {
        **_perplexities("59.82", "57.55", YANG, ("", "55.81", ONE_SEED)),
        "rank": (("280", YANG), ("282", PARTHIBAN)),
    },
    "sigsoftmax": {
        **_perplexities("59.69 ± 0.15", "57.05 ± 0.15", PARTHIBAN),
        "rank": (("5,113 ± 85", PARTHIBAN),),
    },
    "gss": {
        **_perplexities("59.51 ± 0.13", "57.00 ± 0.14", PARTHIBAN),
        "rank": (("8,904 ± 57", PARTHIBAN),),
    },
    "plif": {
        **_perplexities("59.08 ± 0.09", "56.80 ± 0.11", PARTHIBAN),
        "rank": (("496 ± 83", PARTHIBAN),),
    },
    "mos": {
        **_perplexities(
            *("58.08", "55.97", YANG), ("57.14 ± 0.26", "54.91 ± 0.26", PARTHIBAN)
        ),
        "fine_valid": (("56.54", YANG),),
        "fine_test": (("54.44", YANG),),
        "dynamic": (("47.69", YANG),),
        "rank": (("9,981", YANG), ("9,981 ± 2", PARTHIBAN)),
    },
    "mos-280": {"test": (("56.39 ± 0.19", MATCHED),)},
    "softmax-340": {"test": (("56.45 ± 0.10", MATCHED),)},
    **_by_components(
        (1, None, ("64.50", "282")),
        (3, ("58.62", "6,467"), ("59.25", "5,575")),
        (5, ("57.36", "8,930"), ("58.38", "8,057")),
        (10, ("56.33", "9,973"), ("56.21", "9,976")),
        (20, ("56.17", "9,981"), ("56.19", "9,980")),
    ),
}

_WT2: _ByHead = {
    "softmax": {
        **_perplexities(
            *("69.1", "66.0", MERITY), ("67.57 ± 0.14", "64.63 ± 0.08", PARTHIBAN)
        ),
        "fine_valid": (("68.6", MERITY),),
        "fine_test": (("65.8", MERITY),),
        "dynamic": (("44.3", KRAUSE),),
        "cache": (("52.0", MERITY),),
        "rank": (("402", PARTHIBAN),),
    },
    "moc": {
        **_perplexities("68.76", "65.98", YANG, ("", "65.83", ONE_SEED)),
        "rank": (("302", PARTHIBAN),),
    },
    "sigsoftmax": {
        **_perplexities("67.28 ± 0.16", "64.35 ± 0.17", PARTHIBAN),
        "rank": (("6,634 ± 46", PARTHIBAN),),
    },
    "gss": {
        **_perplexities("67.35 ± 0.22", "64.50 ± 0.13", PARTHIBAN),
        "rank": (("10,122 ± 72", PARTHIBAN),),
    },
    "plif": {
        **_perplexities("67.15 ± 0.21", "64.16 ± 0.17", PARTHIBAN),
        "rank": (("524 ± 74", PARTHIBAN),),
    },
    "mos": {
        **_perplexities(
            *("66.01", "63.33", YANG), ("64.54 ± 0.36", "61.96 ± 0.40", PARTHIBAN)
        ),
        "fine_valid": (("63.88", YANG),),
        "fine_test": (("61.45", YANG),),
        "dynamic": (("40.68", YANG),),
        "rank": (("15,734 ± 188", PARTHIBAN),),
    },
    "mos-10": {"test": (("63.62", TRIGGERED),), "rank": (("12,198", TRIGGERED),)},
    "mos-20": {"test": (("62.76", TRIGGERED),), "rank": (("13,998", TRIGGERED),)},
}

_LM1B: _ByHead = {
    "softmax": _perplexities("", "42.77", YANG),
    "mos": _perplexities("38.01", "37.10", YANG),
}


def _epochs(ptb, wt2):
    """Lines of the table of times: seconds per epoch, which is what is published."""
    return {
        "ptb": ((f"{ptb} s per epoch", EPOCH),),
        "wt2": ((f"{wt2} s per epoch", EPOCH),),
    }


_TIME: _ByHead = {
    "softmax": _epochs(55, 72),
    "sigsoftmax": _epochs(57, 83),
    "gss": _epochs(58, 87),
    "plif": _epochs(59, 93),
    "mos": _epochs(100, 600),
}

PUBLISHED = {"ptb": _PTB, "wt2": _WT2, "lm1b": _LM1B, "time": _TIME}


def find(data: str, head: str, line: str) -> Published:
    """(value, source) of what is published; none where nothing is."""
    return PUBLISHED[data].get(head, {}).get(line, ())
