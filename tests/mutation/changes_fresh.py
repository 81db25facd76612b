"""Wrong changes that were written without a look at the tests, round after round, in
the format of the other lists.
"""

from tests.mutation import Change

CHANGES = [
    Change(
        "experiments/bundled_quality.py",
        'baseline = ngram.fit(ids["train"],',
        'baseline = ngram.fit(ids["eval"],',
        "the n-gram is fitted to the sentences that it is evaluated on",
        "test_wiring_models.py test_kept.py test_counts.py test_wiring_units.py test_provenance.py",
    ),
    Change(
        "experiments/bundled_quality.py",
        'text |= {part: sentences_fingerprint(split[part]) for part in ("train", "eval")}',
        'text |= {part: sentences_fingerprint(split["train"]) for part in ("train", "eval")}',
        "bundled_quality: fingerprint of eval is that of train",
        "test_wiring_models.py test_kept.py test_counts.py test_wiring_units.py test_provenance.py",
    ),
    Change(
        "experiments/benchmark.py",
        "eval=random_sentences(max(_SENTENCES.value // 3, 1), vocabulary, FLAGS.seed + 2)",
        "eval=random_sentences(max(_SENTENCES.value // 3, 1), vocabulary, FLAGS.seed + 1)",
        "benchmark reads the sentences that it fits on",
        (
            "test_wiring_measures.py test_kept.py test_counts.py test_benchmark.py "
            "test_wiring_units.py test_provenance.py"
        ),
    ),
    Change(
        "experiments/common.py",
        'if self.config.get("fit_tokens") == "all":',
        'if self.config.get("tokens") == "all":',
        "maps.json does not say that all tokens were fitted on",
        (
            "test_wiring_jumps.py test_kept.py test_counts.py test_wiring_linearity.py "
            "test_wiring_parts.py test_wiring_rest.py test_wiring_units.py "
            "test_wiring_early_exit.py test_provenance.py test_pieces.py"
        ),
    ),
    Change(
        "experiments/text_flags.py",
        (
            '        "fit": fingerprint(examples.fit),\n'
            '        "eval": fingerprint(examples.eval),\n'
        ),
        (
            '        "fit": fingerprint(examples.eval),\n'
            '        "eval": fingerprint(examples.fit),\n'
        ),
        "cross_corpus: the fingerprints of fit and eval are swapped in results.json",
        "test_wiring_jumps.py test_kept.py test_counts.py test_wiring_linearity.py "
        "test_wiring_parts.py test_wiring_rest.py test_wiring_units.py test_wiring_early_exit.py "
        "test_provenance.py test_pieces.py",
    ),
    Change(
        "jmat/studies/settings.py",
        "{name: fingerprint(split) for name, split in self.splits}",
        "{name: fingerprint(split) for (name, _), (_, split) in zip(self.splits, self.splits[::-1])}",
        "studies: the fingerprints of fit and eval are swapped in results.json",
        "test_wiring_jumps.py test_kept.py test_counts.py test_wiring_linearity.py "
        "test_wiring_parts.py test_wiring_rest.py test_wiring_units.py test_wiring_early_exit.py "
        "test_provenance.py test_pieces.py",
    ),
    Change(
        "jmat/studies/linearity/study.py",
        "snapshots(subject, options, kept, None if other is model else other)",
        "snapshots(subject, options, kept)",
        "snapshots of the other model are taken for the first one's",
        "test_wiring_linearity.py",
    ),
    Change(
        "jmat/studies/linearity/study.py",
        '"linearity.png": plots.plot_linearity,\n        "geometry.png": plots.plot_geometry',
        '"linearity.png": plots.plot_geometry,\n        "geometry.png": plots.plot_linearity',
        "two figures of linearity are swapped",
        "test_wiring_linearity.py",
    ),
    Change(
        "jmat/studies/fitting.py",
        "first = int(causal) if settings.skip_first is None else settings.skip_first",
        "first = int(not causal) if settings.skip_first is None else settings.skip_first",
        "all tokens of protocol jmat: the first position is skipped for masked models",
        "test_wiring_linearity.py test_kept.py test_counts.py test_wiring_jumps.py "
        "test_wiring_units.py test_routes.py test_linearity.py",
    ),
    Change(
        "jmat/studies/peek/study.py",
        "predictions.add(logits(model, streams[L][:_READ]))",
        "predictions.add(logits(model, streams[0][:_READ]))",
        "peek's note is on what the embedding predicts",
        "test_wiring_early_exit.py test_kept.py",
    ),
    Change(
        "experiments/pretrain.py",
        'held_out = packing.pack(pairs["eval"], length)',
        'held_out = packing.pack(pairs["fit"], length)',
        "the final loss is of the watched sentences",
        (
            "test_wiring_models.py test_kept.py test_counts.py test_pretraining.py "
            "test_pretrain.py test_wiring_units.py"
        ),
    ),
    Change(
        "jmat/studies/probe/study.py",
        '[f"{text} {label}" for text, label in zip(',
        "[text for text, label in zip(",
        "the fingerprint of labelled texts leaves out the labels",
        "test_wiring_rest.py",
    ),
    Change(
        "jmat/studies/prune/study.py",
        "for last in steps[-1:]",
        "for last in steps[:1]",
        "the maps of the least pruned model are saved",
        "test_wiring_rest.py",
    ),
    Change(
        "experiments/regularizer_study.py",
        'if row["metric"] == "eval_loss"]',
        'if row["metric"] == "eval_accuracy"]',
        "the study reports accuracy in place of the held-out loss",
        "test_wiring_models.py test_kept.py test_counts.py test_wiring_units.py "
        "test_experiments.py",
    ),
    Change(
        "experiments/steps.py",
        'done, given = out / "done.json", [*own, *more, *trained]',
        'done, given = out / "done.json", [*own, *more]',
        "a step is not repeated where the model was trained with other flags",
        "test_wiring_models.py test_kept.py test_counts.py test_wiring_units.py "
        "test_experiments.py",
    ),
    Change(
        "jmat/studies/verify/study.py",
        "sentences_fingerprint(SENTENCES if text is None else [text])",
        "sentences_fingerprint(SENTENCES)",
        "verify's fingerprint is of the built-in sentences always",
        "test_wiring_measures.py",
    ),
    Change(
        "jmat/studies/evaluation.py",
        (
            "            rows.append(\n"
            "                {\n"
            "                    **row,\n"
            "                    **_perplexity(\n"
            '                        read["cross_entropy"][known],\n'
            "                        None if groups is None else groups[known],\n"
            "                        seed,\n"
            "                    ),\n"
            "                }\n"
            "            )\n"
        ),
        (
            '            rows.append({**row, **_perplexity(read["cross_entropy"][known], None, seed)})\n'
        ),
        "intervals of perplexity are over examples, not sentences",
        (
            "test_jumps.py test_kept.py test_counts.py test_intervals.py test_wiring_jumps.py "
            "test_wiring_parts.py test_notes.py"
        ),
    ),
    Change(
        "jmat/models/flops.py",
        "blocks = exits * block_flops(config, 1, tokens)",
        "blocks = exits * block_flops(config, 1, (tokens + 1) / 2)",
        "a generated token looks at half of those before it",
        "test_numbers_on_paper.py test_early_exit_rows.py test_early_exit.py test_prune_figures.py",
    ),
    Change(
        "jmat/report/notes.py",
        'f"{len(missing)} of {len(rows)} rows{_which(missing)} have no value: {note}"',
        'f"{len(missing)} of {len(having_it)} rows{_which(missing)} have no value: {note}"',
        "a note counts only the rows that have it",
        "test_notes.py test_results.py",
    ),
    Change(
        "jmat/studies/linearity/rows.py",
        "least, most = order[half:][::-1][:count], order[:half][:count]",
        "least, most = order[half:][:count], order[:half][:count]",
        "the least linear tokens begin in the middle",
        (
            "test_linearity_rows.py test_kept.py test_counts.py test_linearity.py "
            "test_wiring_linearity.py test_intervals.py test_notes.py"
        ),
    ),
    Change(
        "jmat/studies/linearity/intrinsic.py",
        "kept = ratios[: len(ratios) // 5]",
        "kept = ratios[: len(ratios) // 10]",
        "public_code reads the lowest tenth",
        (
            "test_linearity_rows.py test_kept.py test_counts.py test_linearity.py "
            "test_wiring_linearity.py test_intervals.py test_notes.py"
        ),
    ),
    Change(
        "jmat/studies/early_exit/curves.py",
        (
            "            {\n"
            "                **label,\n"
            '                "metric": "calibrated_lambda",\n'
            '                "value": float(lam),\n'
            '                "n": fitted.hits.shape[1],\n'
            '                "note": note,\n'
            "            }\n"
        ),
        (
            '            {**label, "metric": "calibrated_lambda", "value": float(lam), "n": n, "note": note}\n'
        ),
        "n of the calibrated lambda counts the sentences it is verified on",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/prune/rows.py",
        '"step": len(of[0]),',
        '"step": len(of[0]) + 1,',
        "step of a score counts from 1",
        (
            "test_prune_figures.py test_kept.py test_counts.py test_prune.py test_intervals.py "
            "test_wiring_rest.py"
        ),
    ),
    Change(
        "jmat/studies/probe/labels.py",
        "if text[0].isdigit():",
        "if any(c.isdigit() for c in text):",
        "words with a digit are numbers",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/tasks/scoring.py",
        '"lines": len(sums),',
        '"lines": len(encoded),',
        "lines counts those without a token to predict",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/peek/page.py",
        'f"{share:.1f} %" if share >= 0.1 else "< 0.1 %"',
        'f"{share:.1f} %" if share >= 1 else "< 0.1 %"',
        "a page says < 0.1 % of 0.5 %",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "experiments/benchmarking/rows.py",
        'spread = {"low": min(each), "high": max(each), "n": len(each)}',
        'spread = {"low": max(each), "high": min(each), "n": len(each)}',
        "the extremes of a ratio are swapped",
        "test_wiring_measures.py test_kept.py test_counts.py test_benchmark.py",
    ),
    Change(
        "experiments/benchmarking/passes.py",
        '"padding_waste": 1 - tokens / packed,',
        '"padding_waste": tokens / packed,',
        "padding_waste is the share of real tokens",
        "test_wiring_measures.py test_kept.py test_counts.py test_benchmark.py",
    ),
    Change(
        "jmat/data/splitting.py",
        "cut = round(len(ranked) * fit / (fit + held_out))",
        "cut = round(len(ranked) * held_out / (fit + held_out))",
        "a user's text is divided by the share of evaluation",
        "test_corpus.py test_kept.py test_counts.py test_names.py test_wiring_jumps.py",
    ),
    Change(
        "jmat/studies/routes.py",
        "return 4 * tokens * width * (layers + 1 + 2 * min(MOST_AT_ONCE, layers) + 1)",
        "return 4 * tokens * width * (layers + 1)",
        "memory of activations leaves out what the device holds",
        (
            "test_routes.py test_kept.py test_counts.py test_streaming.py test_numbers_on_paper.py "
            "test_wiring_jumps.py"
        ),
    ),
    Change(
        "experiments/pretraining/reported.py",
        'if row.get("map") not in maps or row.get("confidence", "gap") != "gap":',
        'if row.get("map") not in maps:',
        "the study reports layers saved of all confidences",
        "test_wiring_models.py test_kept.py test_counts.py test_wiring_rest.py test_experiments.py",
    ),
    Change(
        "jmat/report/environment.py",
        '"devices": [f"{count} x {kind}" for kind, count in devices.items()],',
        '"devices": [f"1 x {kind}" for kind, count in devices.items()],',
        "the environment says one device of each kind",
        "test_results.py test_provenance.py test_defaults.py",
    ),
    Change(
        "jmat/runtime/locks.py",
        'f"{holder}, process {self._owner} on {socket.gethostname()}\\n"',
        'f"{holder}, process {os.getppid()} on {socket.gethostname()}\\n"',
        "the lock names another process",
        "test_folders.py",
    ),
    Change(
        "jmat/studies/cross_corpus/study.py",
        "smallest = min(",
        "smallest = max(",
        "sizes may be those of the largest corpus",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/early_exit/study.py",
        'named = {f"mat.{l}.{L}": jumps[l, L] for l in range(L)}',
        'named = {f"mat.{l}.{L}": jumps[l, L] for l in range(1, L)}',
        "early_exit does not save the map from layer 0",
        (
            "test_wiring_early_exit.py test_kept.py test_counts.py test_early_exit.py "
            "test_wiring_units.py test_wiring_models.py"
        ),
    ),
    Change(
        "experiments/cli.py",
        "    if not claim.locked:",
        "    if claim.locked:",
        "a folder without locks is not told of",
        "test_folders.py",
    ),
    Change(
        "jmat/runtime/mesh.py",
        'return 1024 if devices[0].platform == "cpu" else 4096 * len(devices)',
        'return 1024 if devices[0].platform == "cpu" else 4096',
        "the usual batch of several accelerators is that of one",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/prune/merge.py",
        "return Linear(C, c if solution.bias is None else c + solution.bias), solution",
        "return Linear(C, c if solution.bias is None else solution.bias), solution",
        "merging from the output forgets the bias of the projection",
        (
            "test_prune_figures.py test_kept.py test_counts.py test_prune.py test_intervals.py "
            "test_wiring_rest.py"
        ),
    ),
    Change(
        "jmat/data/kinds.py",
        "2 * framed.sum() < number",
        "framed.sum() < number",
        "one sentence without special tokens makes a remark",
        "test_kinds.py",
    ),
    Change(
        "experiments/benchmarking/memory.py",
        'return {"growth": peak - before,',
        'return {"growth": peak,',
        "the growth of memory is all of the process",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "experiments/pretraining/limits.py",
        'settings["epochs"] * per_epoch',
        'settings["epochs"] * rows',
        "epochs are counted in rows, not in batches",
        "test_pretraining.py test_kept.py test_counts.py test_pretrain.py test_wiring_models.py",
    ),
    Change(
        "jmat/checkpoint/model.py",
        'hf = {**config.to_hf(), "dtype": dtype}',
        'hf = {"dtype": "float32", **config.to_hf()}',
        "config.json of a saved model keeps the dtype of what was read",
        (
            "test_checkpoint.py test_load.py test_bad_checkpoints.py test_precision.py "
            "test_family_files.py test_mutated_files.py"
        ),
    ),
    Change(
        "jmat/data/hub_tasks.py",
        '{"cause": "because", "effect": "so"}',
        '{"cause": "so", "effect": "because"}',
        "COPA asks for the cause with so",
        "test_hub_tasks.py",
    ),
    Change(
        "experiments/bundled_quality.py",
        "first, after = len(special.before) if masked else 1, len(special.after)",
        "first, after = len(special.before) if masked else 1, 0",
        "[SEP] may be the token that is masked",
        "test_wiring_models.py test_kept.py test_counts.py test_wiring_units.py test_provenance.py",
    ),
    Change(
        "experiments/bundled_quality.py",
        'if int(best) == known_id(tokenizer, "eos"):\n            break',
        'if int(best) == known_id(tokenizer, "eos"):\n            at += 1\n            break',
        "a continuation ends with the token at its end",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "experiments/benchmark.py",
        "for part in (part for part in PARTS if part in parts):",
        "for part in PARTS:",
        "--parts does nothing to what is measured",
        (
            "test_wiring_measures.py test_kept.py test_counts.py test_benchmark.py "
            "test_wiring_units.py test_provenance.py"
        ),
    ),
    Change(
        "experiments/check_text.py",
        "    elif named_corpus(source) not in hub_corpora.SOURCES:",
        "    elif named_corpus(source) is None and not FLAGS.piece_length:",
        "the study does not check the text of pieces or of docs",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "experiments/common.py",
        (
            "        words += [\n"
            '            f"{name}={str(value).lower()}" for name, value in chosen.items() if value is not None\n'
            "        ]\n"
        ),
        (
            '        words += [f"{name}={str(value).lower()}" for name, value in chosen.items() if value]\n'
        ),
        "maps.json leaves out skip_first=0 and skip_special=false",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "experiments/common.py",
        "    if needs_head:\n        check_head(model)\n    mask",
        "    if not needs_head:\n        check_head(model)\n    mask",
        "a model without a head is refused by the wrong experiments",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/fitting.py",
        "if int(solution.rank) < solution.weights.shape[0]:",
        "if int(solution.rank) < solution.n:",
        "ranks are held against the number of examples",
        (
            "test_wiring_jumps.py test_kept.py test_counts.py test_wiring_linearity.py "
            "test_wiring_parts.py test_wiring_rest.py test_wiring_units.py "
            "test_wiring_early_exit.py test_provenance.py test_pieces.py"
        ),
    ),
    Change(
        "experiments/cross_corpus.py",
        "text={corpus: each.text() for corpus, each in jobs.items()}",
        "text={corpus: job.text() for corpus, each in jobs.items()}",
        "every corpus has the fingerprint of the first",
        (
            "test_wiring_rest.py test_kept.py test_counts.py test_cross_corpus.py "
            "test_wiring_units.py test_experiments.py"
        ),
    ),
    Change(
        "jmat/studies/early_exit/study.py",
        'cheap = {"check_every": every, "words": len(words)}',
        'cheap = {"check_every": every, "words": options.short_list}',
        "the cheap check is charged for more words than the vocabulary has",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/fitting.py",
        "activations = memory_of_activations(count, config.width, sites - 1)",
        "activations = memory_of_activations(split.num_examples, config.width, sites - 1)",
        "the route is chosen by the sampled positions always",
        "test_wiring_jumps.py test_kept.py test_counts.py test_routes.py",
    ),
    Change(
        "jmat/studies/linearity/study.py",
        (
            'for extreme in ("least_linear", "most_linear"):\n        found = [row for row '
            'in own if row.get("extreme") == extreme][:8]'
        ),
        (
            'for extreme in ("least_linear", "most_linear"):\n        found = [row for row '
            'in own if row.get("extreme")][:8]'
        ),
        "the most linear tokens are printed as the least",
        (
            "test_wiring_linearity.py test_kept.py test_counts.py test_linearity.py "
            "test_linearity_rows.py test_wiring_units.py"
        ),
    ),
    Change(
        "jmat/studies/peek/study.py",
        "layers = sorted({*chosen_layers(options.layers, L), L})",
        "layers = sorted({*chosen_layers(options.layers, L), 0, L})",
        "peek always shows the embedding",
        (
            "test_wiring_early_exit.py test_kept.py test_counts.py test_peek.py "
            "test_wiring_units.py test_folders.py"
        ),
    ),
    Change(
        "experiments/pretrain.py",
        'averaged = settings["checkpoint_every"], settings["average_checkpoints"]',
        'averaged = settings["checkpoint_every"], 1',
        "--average_checkpoints does nothing",
        (
            "test_wiring_models.py test_kept.py test_counts.py test_pretraining.py "
            "test_pretrain.py test_wiring_units.py"
        ),
    ),
    Change(
        "experiments/pretrain.py",
        "if _KEEP_EVERY.value and done % _KEEP_EVERY.value == 0:",
        "if _KEEP_EVERY.value and step % _KEEP_EVERY.value == 0:",
        "kept models are those of one step later",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "experiments/regularizer_study.py",
        'for weight in ["0"] if kind == "none" else weights:',
        'for weight in weights[:1] if kind == "none" else weights:',
        "the study's model without penalty has a weight",
        "test_wiring_models.py test_kept.py test_counts.py test_wiring_units.py "
        "test_experiments.py",
    ),
    Change(
        "experiments/streams.py",
        "if code in (None, 0) and problems:",
        "if problems:",
        "an error's exit code is replaced by that of a closed pipe",
        "test_streams.py test_kept.py test_counts.py ",
    ),
    Change(
        "jmat/studies/submodules/study.py",
        'METRICS = ("precision@1"',
        'METRICS = ("recall@1"',
        "submodule_ablation prints and draws recall@1",
        "test_wiring_parts.py test_kept.py test_counts.py test_submodules.py test_defaults.py",
    ),
    Change(
        "jmat/studies/tasks/study.py",
        "for name, asked in tasks.items():\n        rows += task_rows(model, tokenizer, name, "
        "asked,",
        (
            "for name, asked in reversed(tasks.items()):\n        rows += "
            "task_rows(model, tokenizer, name, next(iter(tasks.values())),"
        ),
        "all tasks are the first one",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/data/examples.py",
        "return np.where(ends, -1, split.tokens[np.minimum(where + 1, len(split.tokens) - 1)])",
        "return split.tokens[np.minimum(where + 1, len(split.tokens) - 1)]",
        "the last token of a sentence predicts the first of the next",
        "test_capture.py test_kept.py test_counts.py test_wiring_jumps.py test_probe.py",
    ),
    Change(
        "jmat/studies/cross_corpus/rows.py",
        "SIZES = (250, 500, 1000, 2000, 4000, 8000)",
        "SIZES = (250, 500, 1000, 2000, 4000)",
        "default sizes end at 4,000",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/cross_corpus/rows.py",
        "if None in each",
        "if all(value is None for value in each)",
        "a mean over layers leaves out those without a value",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/early_exit/curves.py",
        "lengths = positions + 1 if causal else whole",
        "lengths = whole",
        "timed sentences of causal models run to their end",
        (
            "test_early_exit.py test_kept.py test_counts.py test_early_exit_rows.py "
            "test_intervals.py test_stopping.py test_wiring_early_exit.py"
        ),
    ),
    Change(
        "jmat/studies/linearity/rows.py",
        "known = np.flatnonzero(often >= min(_OFTEN, often.max()))",
        "known = np.flatnonzero(often >= _OFTEN)",
        "short texts have no least linear tokens",
        (
            "test_linearity_rows.py test_kept.py test_counts.py test_linearity.py "
            "test_wiring_linearity.py test_intervals.py test_notes.py"
        ),
    ),
    Change(
        "jmat/metrics/predictions.py",
        "entropy = -jnp.sum(jnp.where(p > 0, p * log_p, 0), axis=-1)",
        "entropy = -jnp.sum(jnp.where(p > 0, p * log_p, 0), axis=-1) / jnp.log(2.0)",
        "entropy in bits",
        "test_metrics.py test_intervals.py test_r2.py test_notes.py",
    ),
    Change(
        "jmat/report/notes.py",
        "if not (np.isfinite(low) and np.isfinite(high)):",
        "if not (np.isfinite(low) or np.isfinite(high)):",
        "half an interval is given where the other end is infinite",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/peek/predictions.py",
        "return int(masks[0] if len(masks) else words[-1] if len(words) else len(tokens) - 1)",
        "return int(masks[-1] if len(masks) else words[-1] if len(words) else len(tokens) - 1)",
        "the terminal shows the last mask",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/report/plots.py",
        'panel.text(j, i, text, ha="center", va="center", color=shade, fontsize=7)',
        'panel.text(i, j, text, ha="center", va="center", color=shade, fontsize=7)',
        "digits of a heat map are transposed",
        "test_plots.py",
    ),
    Change(
        "jmat/studies/prune/scores.py",
        "float(np.arccos(cosine).mean() / np.pi)",
        "float(np.arccos(cosine).mean())",
        "the angular distance is in radians",
        (
            "test_prune_figures.py test_kept.py test_counts.py test_prune.py test_intervals.py "
            "test_wiring_rest.py"
        ),
    ),
    Change(
        "jmat/studies/prune/surgery.py",
        'about = {"method": method, "removed": sorted(removed), "blocks": label(removed)}',
        'about = {"method": "map", "removed": sorted(removed), "blocks": label(removed)}',
        "pruned.json calls distilled maps fitted ones",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/studies/r2.py",
        "seen.varies)\n            rows.append(with_note(row, note))",
        "self._everywhere.varies)\n            rows.append(with_note(row, note))",
        "constant coordinates behind the first position are not told of",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/report/tables.py",
        'return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.2e}"',
        'return f"{value:.3f}" if value < 1e4 else f"{value:.2e}"',
        "large negative figures are written out",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/capture/stream.py",
        "return (position >= skip_first) & ~np.isin(split.tokens, list(skip_tokens))",
        "return (position >= skip_first) | ~np.isin(split.tokens, list(skip_tokens))",
        "tokens are left out only where both rules say so",
        "test_streaming.py test_linearity.py test_routes.py test_snapshots.py",
    ),
    Change(
        "jmat/studies/submodules/heads.py",
        'stand_ins = {"mat": maps[i](read), "no": jnp.zeros_like(heads)}',
        'stand_ins = {"mat": maps[i](read), "no": jnp.broadcast_to(heads.mean((0, 1)), heads.shape)}',
        "a removed head is replaced by its mean",
        "test_submodules.py test_kept.py test_counts.py test_wiring_parts.py test_intervals.py",
    ),
    Change(
        "jmat/studies/verify/differences.py",
        "for part in (8, 3, 1)]",
        "for part in (8, 3)]",
        "verify never reads the whole text",
        "test_verify.py test_kept.py test_counts.py test_wiring_measures.py test_notes.py",
    ),
    Change(
        "jmat/data/sampling.py",
        "{*special_ids(tokenizer), *before}",
        "{*special_ids(tokenizer)}",
        "BOS that is not called special is read",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/checkpoint/load.py",
        'DTYPES = ("float32", "bfloat16", "float16")',
        'DTYPES = ("float32", "bfloat16")',
        "float16 is refused",
        (
            "test_checkpoint.py test_load.py test_bad_checkpoints.py test_precision.py "
            "test_family_files.py test_mutated_files.py"
        ),
    ),
    Change(
        "jmat/studies/tasks/scoring.py",
        "if (size := len(joined) - shared) > limit - max(len(before), 1):",
        "if (size := len(joined) - shared) > limit:",
        "a choice as long as the model's positions is not refused",
        "test_tasks.py test_kept.py test_counts.py test_intervals.py test_wiring_models.py",
    ),
    Change(
        "jmat/studies/prune/plans.py",
        (
            "    outside = {\n"
            '        name: site for name, site in sites.items() if ".".join(name.split(".")[:2]) not in gone\n'
            "    }\n"
        ),
        ("    outside = dict(sites)\n"),
        "what stood in for parts of a removed block stays",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "experiments/benchmarking/maps.py",
        "return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))",
        "return float(np.linalg.norm(value - exact) / np.linalg.norm(value))",
        "errors are relative to what is measured",
        "test_counts.py test_wiring_units.py",
    ),
    Change(
        "jmat/data/encoding.py",
        "own = own[-room:] if keep_end else own[:room]",
        "own = own[:room]",
        "texts that should lose their beginning lose their end",
        "test_encoding.py test_checkpoint_tokenizer.py test_tasks.py",
    ),
    Change(
        "jmat/models/sites.py",
        '    if ".attn.head." in site:\n        return (K,)',
        '    if ".attn.head." in site:\n        return (config.width,)',
        "a head is as wide as the stream",
        "test_sites.py",
    ),
    Change(
        "jmat/runtime/mesh.py",
        "axis = max(divisible, key=lambda axis: shape[axis], default=None)",
        "axis = min(divisible, key=lambda axis: shape[axis], default=None)",
        "parameters are split along their smallest axis",
        "test_sharding.py test_streaming.py test_capture.py test_numbers_on_paper.py",
    ),
]
