import json

import numpy as np
import pytest

from softbottle.data.vocab import Vocab
from softbottle.experiments import continuation
from tests import commands, tiny

pytestmark = pytest.mark.usefixtures("quick_keys")
VOCAB, WIDTH, EOS = 11, 4, 0
WORDS = tiny.make_words(VOCAB)
SETTINGS = continuation.Settings(prompts=7, prompt_words=3, tokens=4, seeds=(0, 1))


def make_run(seed=0, vocab=WORDS):
    config = tiny.make_softmax(
        "transformer",
        WIDTH,
        cache__objective="trime",
        data__unit="packed",
        data__eval_rows=2,
        data__eval_length=16,
        data__synthetic__words=VOCAB,
        data__synthetic__train_tokens=400,
        data__synthetic__eval_tokens=400,
    )
    return tiny.draw_run(config, vocab, seed)


def make_ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def arrays(*texts):
    return [np.array(text, np.int32) for text in texts]


def test_prompts_are_the_beginnings_of_lines_that_go_on_long_enough():
    ids = np.array([9, 0, *range(1, 9), 0, 1, 2, 0, 0, *range(7, 0, -1), 0], np.int32)
    given = continuation.beginnings(ids, WORDS, SETTINGS)
    assert given.prompts_BP.tolist() == [[EOS, 1, 2, 3], [EOS, 7, 6, 5]]
    assert [rest.tolist() for rest in given.rests] == [[4, 5, 6, 7], [4, 3, 2, 1]]
    with pytest.raises(ValueError, match=r"of 4 lines 1 have the 8 words of a prompt"):
        longer = continuation.Settings(prompt_words=3, tokens=5)
        continuation.beginnings(ids, WORDS, longer)


def test_a_continuation_ends_with_its_line():
    made_BN = np.array([[3, 1, 0, 2], [0, 4, 4, 4], [5, 6, 7, 8]])
    found = [text.tolist() for text in continuation.until(made_BN, EOS)]
    assert found == [[3, 1], [], [5, 6, 7, 8]]


def test_distinct_ngrams_are_counted_over_all_texts():
    texts = arrays([1, 2, 1, 2], [1, 2, 3], [5])
    assert continuation.distinct(texts, 1) == 4 / 8
    assert continuation.distinct(texts, 2) == 3 / 5
    assert np.isnan(continuation.distinct(texts, 5))


def test_diversity_is_the_product_over_orders_and_the_mean_over_texts():
    # 1 2 1 2 1 has 2 of 4 bigrams, 2 of 3 trigrams and 2 of 2 fourgrams.
    texts = arrays([1, 2, 1, 2, 1], [1, 2, 3, 4, 5], [7])
    expected = (2 / 4 * 2 / 3 + 1 + 1) / 3
    assert continuation.diversity(texts) == pytest.approx(expected)


def test_copied_words_are_those_of_the_own_prompt():
    prompts = arrays([1, 2, 3], [4, 5, 6])
    texts = arrays([1, 1, 4], [1, 5], [])[:2]
    assert continuation.copied(prompts, texts) == 3 / 5


def test_coherence_is_the_mean_cosine_about_the_center():
    center_D = np.array([1.0, 1.0])
    prompt_BD = center_D[None] + np.array([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    text_BD = center_D[None] + np.array([[5.0, 0.0], [1.0, 1.0], [np.nan, np.nan]])
    found = continuation.coherence(prompt_BD, text_BD, center_D)
    assert found == pytest.approx((1 + np.sqrt(0.5)) / 2)


@pytest.mark.slow
def test_a_judge_reads_each_text_by_itself_whatever_the_padding():
    run, texts = make_run(), arrays([3, 1, 4], [], [1, 5, 9, 2, 6])
    read = continuation.make_reader(run)
    mean_BD = read(texts, 7)
    assert np.all(np.isnan(mean_BD[1]))
    for row in (0, 2):
        alone_1D = read([texts[row]], 5)
        np.testing.assert_allclose(mean_BD[row], alone_1D[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_runs_are_compared_with_the_text_itself_and_with_another_line():
    ids = make_ids(400)
    runs = {"one": make_run(1)}
    rows, samples = continuation.compare(runs, {"judge": make_run(3)}, ids, SETTINGS)
    ways = ["the line itself", "another line", "one", "one, cache"]
    assert [row["run"] for row in rows] == ways
    assert [len(row["drawn"]) for row in rows] == [1, 1, 2, 2]
    real, other = (row["drawn"][0] for row in rows[:2])
    assert real["words"] == other["words"] == SETTINGS.tokens
    assert real["distinct_2"] == other["distinct_2"]
    assert real["coherence, judge"] != other["coherence, judge"]
    plain, joint = rows[2], rows[3]
    assert plain["perplexity"] != joint["perplexity"]
    assert "cache_right" not in plain and 0 < joint["cache_right"] < 1
    assert len(samples) == 5 and set(samples[0]) == {"prompt", *ways} - {"another line"}
    text = continuation.table(rows).splitlines()
    assert len(text) == 2 + len(rows) and len({line.count("|") for line in text}) == 1
    assert f"| one | {plain['perplexity']:.2f} |" in text[4] and " ± " in text[4]


def test_models_of_other_words_are_not_compared():
    other = Vocab(("<eos>", *(f"x{index}" for index in range(1, VOCAB))))
    runs = {"one": make_run(), "two": make_run(vocab=other)}
    with pytest.raises(ValueError, match=r"\['one', 'two'\] do not all know"):
        continuation.compare(runs, runs, make_ids(400), SETTINGS)
    # Nor where a run and its judge have one name.
    with pytest.raises(ValueError, match=r"\['mos'\] do not all know"):
        judge = {"mos": runs["two"]}
        continuation.compare({"mos": runs["one"]}, judge, make_ids(400), SETTINGS)


@pytest.mark.slow
def test_a_text_of_other_words_than_the_runs_is_not_continued(tmp_path):
    other = Vocab(("<eos>", *(f"x{index}" for index in range(1, VOCAB))))
    tiny.write_run(tmp_path / "run", make_run(vocab=other))
    flags = [f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]
    code, _, errors = commands.finish(commands.start("continuation.py", *flags))
    assert code == 2 and "words that are not" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_writes_a_table_and_every_number(tmp_path):
    tiny.write_run(tmp_path / "run", make_run())
    flags = [f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]
    flags += ["--prompts=3", "--prompt_words=2", "--tokens=2", "--seeds=5"]
    output = commands.run("continuation.py", *flags)
    table = (tmp_path / "out" / "continuation.md").read_text()
    assert table in output
    result = json.loads((tmp_path / "out" / "continuation.json").read_text())
    assert result["settings"]["seeds"] == [5]
    assert continuation.table(result["rows"]) + "\n" == table
    assert len(json.loads((tmp_path / "out" / "samples.json").read_text())) == 3
