"""Wrong changes of what meets other tools: the LM Evaluation Harness, trackers, trees
of models.
"""

from tests.mutation import Change

_HARNESS = "jmat/studies/tasks/harness.py"
_TRACKING = "experiments/tracking.py"

CHANGES = [
    Change(
        _HARNESS,
        "before = special if context.strip() else SpecialTokens(self._prefix(special))",
        "before = special",
        "an empty context leaves the first token of the answer unscored",
        "test_harness.py",
    ),
    Change(
        _HARNESS,
        "stop = min(limit if scored < limit else scored + limit - 1, len(tokens))",
        "stop = min(scored + limit, len(tokens))",
        "windows of a long text leave tokens out",
        "test_harness.py",
    ),
    Change(
        _HARNESS,
        "passages.append(Passage(tokens[start:stop], scored - start))",
        "passages.append(Passage(tokens[start:stop], 1))",
        "the last window of a long text scores tokens twice",
        "test_harness.py",
    ),
    Change(
        _HARNESS,
        "left_out = Shortcut(exit_layer, layers, Identity())",
        "left_out = Shortcut(exit_layer - 1, layers, Identity()) if exit_layer else {}",
        "an exit leaves out one block more",
        "test_harness.py",
    ),
    Change(
        _HARNESS,
        '        return {"sites": self.sites, "tokens_per_batch": self.tokens_per_batch}',
        '        return {"tokens_per_batch": self.tokens_per_batch}',
        "the harness scores the unedited model",
        "test_harness.py",
    ),
    Change(
        "jmat/studies/tasks/scoring.py",
        "misses = (targets >= 0) & (scores.argmax(-1) != targets)",
        "misses = scores.argmax(-1) != targets",
        "a continuation is greedy only where its context is, too",
        "test_harness.py",
    ),
    Change(
        _TRACKING,
        "numbers = _NUMBERS if None not in steps and len(set(steps)) < len(steps) else ()",
        "numbers = ()",
        "figures of several targets have one name and step",
        "test_tracking.py",
    ),
    Change(
        _TRACKING,
        "    shutil.rmtree(folder, ignore_errors=True)  # what an earlier run of these flags "
        "sent\n",
        "",
        "TensorBoard shows the figures of an earlier run beside the new ones",
        "test_tracking.py",
    ),
    Change(
        _TRACKING,
        "if spec is None or spec.origin is None:",
        "if spec is None:",
        "a folder called wandb counts as the package",
        "test_tracking.py",
    ),
    Change(
        _TRACKING,
        'for end in ("value", "low", "high"):',
        'for end in ("value", "low"):',
        "trackers get no upper ends of intervals",
        "test_tracking.py",
    ),
    Change(
        "experiments/cli.py",
        'skip |= {*figure_flags.NAMES, "track"}',
        "skip |= {*figure_flags.NAMES}",
        "a run with --track does not go on without it",
        "test_tracking.py",
    ),
    Change(
        "experiments/cli.py",
        "    if trackers:\n        when_all_is_done(lambda: say(tracking.send(claim)))\n",
        "",
        "--track sends nothing",
        "test_tracking.py",
    ),
    Change(
        "jmat/models/tree.py",
        "total = sum(part.blocks * part.size for part in parts)",
        "total = sum(part.size for part in parts)",
        "a tree counts repeated blocks once",
        "test_tree.py",
    ),
    Change(
        "jmat/models/tree.py",
        "if alike and alike[-1][1] != part:",
        "if alike and alike[-1][1].parts[0] != part.parts[0]:",
        "a tree shows blocks of several shapes as one",
        "test_tree.py",
    ),
    Change(
        "jmat/models/tree.py",
        " if model.config.tied_head else [])",
        ")",
        "a tree calls every head tied",
        "test_tree.py",
    ),
]
