"""The LM Evaluation Harness finds what the study `tasks` finds. Needs the extra
`lm-eval`.
"""

import json

import pytest

import jmat
from jmat.data.corpus import docs_sentences
from jmat.studies import tasks
from jmat.studies.tasks.harness import harness_model, scorer

pytestmark = pytest.mark.lm_eval
GIVEN = [{}, {"exit_layer": 5}, {"sites": {"block.*.ffn": jmat.Scale(0.5)}}]


@pytest.fixture(scope="module")
def loaded():
    return jmat.load("gpt2-docs")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A file of the second halves of sentences, each among those of two others."""
    sentences = [
        sentence.split() for sentence in docs_sentences()[:400] if 8 < len(sentence.split()) < 20
    ]
    halves = [
        (" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :]))
        for words in sentences[:90]
    ]
    lines = []
    for i in range(0, 90, 3):
        answer = i % 4 % 3
        lines.append(
            {
                "context": halves[i + answer][0],
                "choices": [h[1] for h in halves[i : i + 3]],
                "answer": answer,
            }
        )
    path = tmp_path_factory.mktemp("task") / "halves.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def evaluate(model, questions, **task):
    import lm_eval
    from lm_eval.tasks import TaskManager

    shared = {
        "task": "halves",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
    }
    manager = TaskManager(include_defaults=False)
    asked = {
        "tasks": [shared | task],
        "task_manager": manager,
        "bootstrap_iters": 0,
        "random_seed": None,
    }
    return lm_eval.simple_evaluate(model=model, **asked)["results"]["halves"]


@pytest.mark.parametrize("given", GIVEN, ids=["whole", "exit", "edited"])
@pytest.mark.filterwarnings("default")
def test_accuracies_are_those_of_tasks(loaded, questions, given):
    model, tokenizer = loaded
    results = evaluate(
        harness_model(model, tokenizer, **given),
        questions,
        output_type="multiple_choice",
        doc_to_text="{{context}}",
        doc_to_choice="choices",
        doc_to_target="answer",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    sites = scorer(model, tokenizer, **given).sites
    asked = tasks.read_task(questions)
    rows = {
        row["metric"]: row["value"]
        for row in tasks.run(model, asked, tokenizer=tokenizer, sites=sites).rows
    }
    assert results["acc,none"] == pytest.approx(rows["accuracy"])
    assert results["acc_norm,none"] == pytest.approx(rows["accuracy_norm"])
    assert 0.34 < rows["accuracy"] < 1


@pytest.mark.filterwarnings("default")
def test_perplexity_is_that_of_whole_texts(loaded, questions):
    model, tokenizer = loaded
    results = evaluate(
        harness_model(model, tokenizer),
        questions,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{context}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )
    texts = [question.prompt for question in tasks.read_task(questions)]
    nats = -sum(scorer(model, tokenizer).texts(texts))
    bits = nats / sum(len(text.encode()) for text in texts) / 0.6931471805599453
    assert results["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
