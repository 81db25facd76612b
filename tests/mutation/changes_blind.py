"""Wrong changes thought up without a look at the tests or at the other lists: an
independent count.
"""

from tests.mutation import Change

CHANGES = [
    # --- intervals and bootstrap ---
    Change(
        "jmat/metrics/bootstrap.py",
        "    low, high = percentiles((drawn @ sums) / (drawn @ counts), drawn)",
        "    low, high = percentiles((drawn @ sums) / counts.sum(), drawn)",
        "a resample's sum is held against the number of the whole text",
        "test_metrics.py test_intervals.py",
    ),
    Change(
        "jmat/metrics/bootstrap.py",
        "all(np.array_equal(row, drawn[0]) for row in drawn)",
        "(drawn == drawn[0]).any()",
        "an interval is missing where one sentence is drawn equally often everywhere",
        "test_metrics.py test_intervals.py test_r2.py",
    ),
    Change(
        "jmat/metrics/bootstrap.py",
        "low, high = np.clip(ends, data.min(axis=0), data.max(axis=0))",
        "low, high = np.clip(ends, 0, 1)",
        "intervals of surprisal end at 1 nat",
        "test_metrics.py test_intervals.py test_jumps.py",
    ),
    Change(
        "jmat/studies/cross_corpus/rows.py",
        "np.random.default_rng(seed).permutation(len(streams[final]))",
        "np.arange(len(streams[final]))",
        "the fewer examples of a learning curve are the first ones, whatever the seed",
        "test_cross_corpus.py test_wiring_measures.py",
    ),
    Change(
        "jmat/studies/cross_corpus/study.py",
        '"groups": subjects[name].examples.eval.rows',
        '"groups": next(iter(subjects.values())).examples.eval.rows',
        "the second corpus is resampled by the sentences of the first",
        "test_wiring_rest.py",
    ),
    Change(
        "jmat/studies/prune/study.py",
        (
            "    rows += pruned_rows(\n        model, text, pruned, tokens_per_batch=size, "
            "seed=options.seed, progress=progress\n    )\n"
        ),
        (
            "    rows += pruned_rows(model, text, pruned, tokens_per_batch=size, "
            "progress=progress)\n"
        ),
        "prune's intervals do not depend on --seed",
        "test_wiring_rest.py test_intervals.py test_prune.py test_prune_figures.py",
    ),
    Change(
        "experiments/bundled_quality.py",
        "{name: encode(split[name], tokenizer, size, special) for name, size in most.items()}",
        '{name: encode(split["eval"], tokenizer, size, special) for name, size in most.items()}',
        "the n-gram is fitted on the text that it is evaluated on",
        "test_wiring_models.py test_ngram.py test_experiments.py",
    ),
    # --- fit and evaluation ---
    Change(
        "jmat/studies/layer_jump.py",
        "L, held_out = model.config.layers, subject.examples.eval",
        "L, held_out = model.config.layers, subject.examples.fit",
        "layer_jump evaluates on the fit examples",
        "test_wiring_jumps.py test_experiments.py test_readme.py test_routes.py",
    ),
    Change(
        "jmat/studies/r2.py",
        "held_out = subject.examples.eval",
        "held_out = subject.examples.fit",
        "r2 evaluates on the fit examples",
        "test_wiring_jumps.py test_experiments.py test_r2.py",
    ),
    Change(
        "experiments/text_flags.py",
        "fit, held_out = draw_sentences(source)\n            examples",
        "held_out, fit = draw_sentences(source)\n            examples",
        "fit and evaluation text change places on their way from a corpus",
        "test_wiring_jumps.py test_wiring_units.py",
    ),
    Change(
        "jmat/data/pieces.py",
        "held_out = generator.sample(rest, num_eval)",
        "held_out = random.Random(seed).sample(range(count), num_eval)",
        "pieces to evaluate on are among those fitted on",
        "test_pieces.py",
    ),
    Change(
        "jmat/studies/linearity/study.py",
        "sentence_batches(subject, held_out, options.tokens, options)",
        "sentence_batches(subject, fit, options.tokens, options)",
        "linearity is held out on the text of the fit",
        "test_wiring_linearity.py test_linearity.py test_experiments.py",
    ),
    Change(
        "jmat/studies/early_exit/study.py",
        "(name, l): (of[l], held_out[sites[l]]) for name, of in maps.items() for l in range(L + 1)",
        "(name, l): (of[l], fit[sites[l]]) for name, of in maps.items() for l in range(L + 1)",
        "early exit evaluates its shortcuts on the fit examples",
        "test_wiring_early_exit.py test_early_exit.py test_experiments.py",
    ),
    Change(
        "jmat/studies/submodules/study.py",
        "acts, part_maps, resamples(held_out.positions, held_out.rows, seed=options.seed)",
        "fit, part_maps, resamples(held_out.positions, held_out.rows, seed=options.seed)",
        "r2 of the parts is of the fit examples",
        "test_wiring_parts.py test_submodules.py test_experiments.py",
    ),
    Change(
        "jmat/studies/probe/study.py",
        "_read(against, examples, labels",
        "_read(against._replace(model=model), examples, labels",
        "probe --against probes the first model on what the second reads",
        "test_wiring_rest.py test_probe.py",
    ),
    Change(
        "experiments/probe.py",
        "examples=text_flags.prepare_examples(other.model, other.tokenizer, job.source)",
        "examples=job.examples",
        "the second model reads text in the tokens of the first",
        "test_wiring_rest.py test_probe.py",
    ),
    # --- early exit ---
    Change(
        "jmat/studies/early_exit/rows.py",
        "flops / full.mean()}",
        "(flops / full).mean(1, keepdims=True) + 0 * flops}",
        "flops_ratio is a mean of ratios, without interval",
        "test_early_exit_rows.py test_early_exit.py test_numbers_on_paper.py",
    ),
    Change(
        "jmat/studies/early_exit/rows.py",
        "t = np.full_like(positions, BERT_POSITION)",
        "t = positions",
        "masked models' thresholds depend on the position under din2023",
        "test_early_exit_rows.py test_early_exit.py test_reference.py",
    ),
    Change(
        "jmat/models/flops.py",
        "last = exits == config.layers",
        "last = exits >= config.layers - 1",
        "an exit at the last but one layer needs no map",
        "test_early_exit_rows.py test_early_exit.py test_numbers_on_paper.py",
    ),
    Change(
        "jmat/models/flops.py",
        "head_at_end = np.where(checked & (words is None), 0, head_flops(config))",
        "head_at_end = np.where(checked, 0, head_flops(config))",
        "with a short list the whole head at the exit is free",
        "test_early_exit_rows.py test_early_exit.py test_numbers_on_paper.py",
    ),
    Change(
        "jmat/studies/early_exit/curves.py",
        "kept = [value for value, hits in zip(grid, result.hits, strict=True) if hits.mean() >= "
        "level]",
        "kept = [value for value, hits in zip(grid, result.hits, strict=True) if hits.mean() <= "
        "level]",
        "the timed lambda is one that does not keep the level",
        "test_early_exit_rows.py test_early_exit.py",
    ),
    # --- fingerprints, hashes, checksums ---
    Change(
        "jmat/data/examples.py",
        "for name in _FIELDS]\n    return short_hash",
        "for name in _FIELDS[:3]]\n    return short_hash",
        "the fingerprint of examples leaves out whose sentence they are of",
        "test_examples.py test_provenance.py",
    ),
    Change(
        "jmat/data/corpus.py",
        'short_hash(*(sentence.encode() + b"\\0" for',
        "short_hash(*(sentence.encode() for",
        "the fingerprint does not see where a sentence ends",
        "test_corpus.py test_provenance.py",
    ),
    Change(
        "experiments/text_flags.py",
        '"eval": fingerprint(examples.eval),',
        '"eval": fingerprint(examples.fit),',
        "results.json gives the fingerprint of the fit text as that of the evaluation text",
        "test_provenance.py test_experiments.py",
    ),
    Change(
        "jmat/studies/settings.py",
        'eval_text=text["eval"]',
        'eval_text=text["fit"]',
        "maps.json gives the fingerprint of the fit text as that of the evaluation text",
        "test_provenance.py test_experiments.py test_maps.py",
    ),
    Change(
        "jmat/report/results.py",
        "return hashlib.sha256(json.dumps(list(rows), default=str).encode()).hexdigest()",
        'return hashlib.sha256(json.dumps([row["metric"] for row in rows]).encode()).hexdigest()',
        "the checksum of rows does not cover their values",
        "test_results.py",
    ),
    Change(
        "jmat/runtime/checkpoints.py",
        "written is not None and written != model_hash(",
        "written is None and written != model_hash(",
        "the checksum of a checkpoint does not cover its arrays",
        "test_pretrain.py test_pretraining.py test_snapshots.py",
    ),
    Change(
        "jmat/maps/files.py",
        "    if checksum is not None and model_hash(tensors) != checksum:",
        "    if checksum is None and model_hash(tensors) != checksum:",
        "a map file's checksum is not looked at",
        "test_maps.py",
    ),
    # --- locks, folders, run.json ---
    Change(
        "jmat/runtime/locks.py",
        "fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "two runs hold the lock of one folder",
        "test_folders.py",
    ),
    Change(
        "jmat/runtime/folders.py",
        "own = [RESULTS, *(name for name in owner.wrote if resumed and name != RESULTS)]",
        "own = [RESULTS]",
        "a run that goes on forgets which files were its own",
        "test_folders.py",
    ),
    Change(
        "jmat/report/results.py",
        "            for name in names:\n                before(name)\n",
        "            before(names[0])\n",
        "run.json does not list maps.json",
        "test_results.py test_folders.py test_wiring_jumps.py",
    ),
    Change(
        "jmat/studies/prune/study.py",
        "before(MODEL)",
        "ignore_message(MODEL)",
        "run.json does not list the pruned model",
        "test_folders.py test_prune.py test_wiring_rest.py",
    ),
    Change(
        "jmat/runtime/folders.py",
        "    if overwrite or not left:",
        "    if overwrite or left:",
        "a run with other flags takes the folder of another without --overwrite",
        "test_folders.py",
    ),
    Change(
        "jmat/runtime/files.py",
        'return match["name"]',
        "return None",
        "temporary files of killed runs stay",
        "test_folders.py",
    ),
    # --- notes ---
    Change(
        "jmat/report/results.py",
        "*format_notes(self.rows), *self.remarks",
        "*self.remarks",
        "studies print no notes",
        "test_notes.py test_wiring_jumps.py test_wiring_rest.py test_wiring_linearity.py",
    ),
    Change(
        "jmat/studies/early_exit/study.py",
        "    rows = noted(rows, predictions.note())\n",
        "",
        "early_exit does not say that predictions do not depend on the text",
        "test_notes.py test_wiring_early_exit.py test_early_exit.py",
    ),
    Change(
        "jmat/metrics/predictions.py",
        "        self._apart = max(self._apart, float(np.nan_to_num(apart, nan=np.inf).max()))",
        "        self._apart = max(self._apart, float(np.nan_to_num(apart, nan=0.0).max()))",
        "predictions that are not numbers count as equal",
        "test_notes.py",
    ),
    Change(
        "jmat/studies/evaluation.py",
        'tied = np.count_nonzero(read["gap"] == 0) if "gap" in read else 0',
        'tied = np.count_nonzero(read["gap"] < 0) if "gap" in read else 0',
        "ties of a shortcut's two most likely tokens are not told",
        "test_notes.py test_jumps.py",
    ),
    Change(
        "jmat/studies/prune/rows.py",
        "    rows = noted(quality_rows(sums, labels, seed=seed), predictions.note())",
        "    rows = noted(quality_rows(sums, labels, seed=seed), None)",
        "prune does not say that predictions do not depend on the text",
        "test_wiring_rest.py",
    ),
    # --- tokens ---
    Change(
        "jmat/data/encoding.py",
        "        pieces.append([_joined(special, own[at : at + room]) for at in range(0, len(own), "
        "room)])",
        "        pieces.append([_joined(special if at == 0 else SpecialTokens(), own[at : at + "
        "room]) for at in range(0, len(own), room)])",
        "only the first piece of a long text has BOS",
        "test_encoding.py test_tasks.py",
    ),
    Change(
        "jmat/data/encoding.py",
        "            after = whole[start + len(inside) :] if masked else []",
        "            after = whole[start + len(inside) :]",
        "causal models get EOS behind every text",
        "test_encoding.py test_examples.py test_tasks.py test_checkpoint_tokenizer.py",
    ),
    Change(
        "jmat/data/encoding.py",
        "return ids[len(before) :] if not special.after and tuple(ids[: len(before)]) == before "
        "else ids",
        "return ids",
        "a text that spells out BOS has it twice",
        "test_encoding.py test_checkpoint_tokenizer.py",
    ),
    Change(
        "jmat/data/sampling.py",
        'return {*tokenizer.all_special_ids} - {encoding.special_id(tokenizer, "unk")}',
        "return {*tokenizer.all_special_ids}",
        "protocol jmat does not read unknown words",
        "test_sampling.py test_examples.py test_encoding.py",
    ),
    Change(
        "jmat/data/sampling.py",
        "default_rng([seed, stream, copies[key], int(key, 16)])",
        "default_rng([seed, copies[key], int(key, 16)])",
        "a sentence has the same position in both parts",
        "test_sampling.py test_examples.py",
    ),
    Change(
        "jmat/checkpoint/tokenizer.py",
        "    if largest >= config.vocab_size:",
        "    if largest > config.vocab_size:",
        "a tokenizer with one id too many is taken",
        "test_checkpoint_tokenizer.py test_load.py test_tokenizers.py",
    ),
    Change(
        "jmat/checkpoint/tokenizer.py",
        (
            '            options["add_bos_token"] = _config(folder / "tokenizer_config.json").get(\n'
            '                "add_bos_token", True\n'
            "            )\n"
        ),
        ('            options["add_bos_token"] = True\n'),
        "add_bos_token=false of a SentencePiece checkpoint is not looked at",
        "test_checkpoint_tokenizer.py test_tokenizers.py",
    ),
    Change(
        "jmat/studies/tasks/scoring.py",
        (
            "    return Passage(\n        tokens, max(len(before) + shared - cut, 1), is_cut=cut > "
            "0 or len(prompt) < len(whole)\n    )\n"
        ),
        (
            "    return Passage(tokens, max(shared - cut, 1), is_cut=cut > 0 or len(prompt) < "
            "len(whole))\n"
        ),
        "with BOS the prompt's last token is scored as if it were of the choice",
        "test_tasks.py test_encoding.py",
    ),
    Change(
        "experiments/bundled_quality.py",
        "    return str(tokenizer.decode(tokens[0, len(special.before) : at].tolist()))",
        "    return str(tokenizer.decode(tokens[0, : at].tolist()))",
        "continuations show BOS",
        "test_wiring_units.py test_wiring_models.py",
    ),
    # --- configs, sizes ---
    Change(
        "jmat/models/config_reader.py",
        "foreign = {name: value for name, value in unread.items() if name not in declared}",
        "foreign = dict(unread)",
        "fields that transformers knows and jmat does not are let through",
        "test_foreign_fields.py test_mutated_configs.py",
    ),
    Change(
        "jmat/models/config_reader.py",
        "            if renamed.get(name) not in (None, value) and name not in self._ignored:",
        "            if False:",
        "two names of one field may differ",
        "test_foreign_fields.py test_mutated_configs.py test_load.py",
    ),
    Change(
        "jmat/data/npz.py",
        "            if announced > most:",
        "            if announced > 1000 * most:",
        "an .npz file may announce a thousand times more than it can hold",
        "test_mutated_files.py test_examples.py",
    ),
    Change(
        "jmat/runtime/json_files.py",
        "    if size > most_bytes:",
        "    if size > 100 * most_bytes:",
        "JSON files may be a hundred times as large",
        "test_bad_checkpoints.py",
    ),
    Change(
        "jmat/models/rotary.py",
        'given = {"factor": num_positions / trained, **scaling} if kind == "yarn" else scaling',
        'given = {**scaling, "factor": num_positions / trained} if kind == "yarn" else scaling',
        "YaRN's factor in the file is not looked at",
        "test_defaults.py test_families.py",
    ),
    # --- prune ---
    Change(
        "jmat/studies/prune/scores.py",
        "sign = -1 if score in _HIGHEST_FIRST else 1",
        'sign = -1 if score == "linearity" else 1',
        "linearity_without_residual removes the lowest first",
        "test_prune_figures.py test_prune.py",
    ),
    Change(
        "jmat/studies/prune/plans.py",
        "        loss=options.distil_loss,\n",
        "",
        "--distil_loss does nothing",
        "test_prune_figures.py test_prune.py test_wiring_rest.py",
    ),
    Change(
        "jmat/studies/prune/plans.py",
        "text = whole_sentences(whole.split, whole.mask_token, most=options.score_sentences)",
        "text = whole_sentences(whole.split, whole.mask_token)",
        "--score_sentences does nothing",
        "test_prune_figures.py",
    ),
    Change(
        "jmat/studies/prune/heal.py",
        "error = error / jnp.float32(x.shape[-1])",
        "error = error / jnp.float32(x.shape[-2])",
        "the plain loss divides by the length of the text",
        "test_prune_figures.py test_prune.py",
    ),
    Change(
        "jmat/studies/prune/rows.py",
        'if "removed" in row and row["metric"] in _PANELS]',
        'if row.get("removed") and row["metric"] in _PANELS]',
        "the figure of prune lacks the whole model",
        "test_plots.py test_prune_figures.py test_prune.py",
    ),
    # --- figures, labels ---
    Change(
        "jmat/studies/linearity/intrinsic.py",
        "    share = (N - len(ratios) + np.arange(1, len(kept) + 1)) / N",
        "    share = np.arange(1, len(kept) + 1) / N",
        "public_code: repeated points do not count in F",
        "test_linearity.py test_linearity_rows.py test_numbers_on_paper.py",
    ),
    Change(
        "jmat/studies/linearity/plots.py",
        '[key("first block", ("0.8", "o")), key("last block", ("0.0", "o"))]',
        '[key("first block", ("0.0", "o")), key("last block", ("0.8", "o"))]',
        "the legend of checkpoints.png calls the last block the first",
        "test_plots.py test_linearity.py",
    ),
    Change(
        "jmat/studies/linearity/plots.py",
        '    rows = next_steps(results["rows"])\n    names',
        '    rows = [row for row in next_steps(results["rows"]) if row["layer"] > 0]\n    names',
        "difference.png lacks the first step",
        "test_plots.py test_linearity.py",
    ),
    Change(
        "jmat/report/plots.py",
        '        grids[row["map"]][row["layer"], row["target"] - 1] = row["value"]',
        '        grids[row["map"]][row["layer"], L - row["target"]] = row["value"]',
        "heat maps of r2 are mirrored",
        "test_plots.py",
    ),
    Change(
        "jmat/studies/linearity/plots.py",
        'title = " − ".join(short_paths(list(dict.fromkeys(names)), least=2))',
        'title = " − ".join(short_paths(list(dict.fromkeys(names)), least=2)[::-1])',
        "the title of difference.png has the models the other way round",
        "test_wiring_linearity.py test_plots.py",
    ),
    # --- a second round, after tests had been added ---
    Change(
        "jmat/studies/submodules/study.py",
        "masked=not model.config.causal",
        "masked=model.config.causal",
        "perplexity of replaced sub-modules is that of the token that is read",
        "test_wiring_parts.py test_submodules.py",
    ),
    Change(
        "jmat/studies/peek/study.py",
        "predictions.add(logits(model, streams[L][:_READ]))",
        "predictions.add(logits(model, streams[L][:1]))",
        "peek cannot see that predictions do not depend on the text",
        "test_wiring_early_exit.py",
    ),
    Change(
        "jmat/studies/tasks/study.py",
        "    read |= {name: sentences_fingerprint(map(repr, asked)) for name, asked in tasks.items()}\n",
        "",
        "results.json of tasks has no fingerprint of the questions",
        "test_provenance.py test_wiring_models.py",
    ),
    Change(
        "experiments/bundled_quality.py",
        'for part in ("train", "eval")}',
        'for part in ("train",)}',
        "results.json of bundled_quality has no fingerprint of the evaluation text",
        "test_provenance.py test_wiring_models.py",
    ),
    Change(
        "experiments/pretrain.py",
        'watched = packing.pack(pairs["fit"][: _EVAL_SENTENCES.value], length)',
        'watched = packing.pack(pairs["train"][: _EVAL_SENTENCES.value], length)',
        "held-out losses are of the training text",
        "test_wiring_models.py",
    ),
    Change(
        "jmat/studies/linearity/study.py",
        "measure(other, *batches,",
        'measure(other, *batches[:: -1 if kept == "against" else 1],',
        "--against is fitted on the evaluation text and held out on the other",
        "test_wiring_linearity.py",
    ),
    Change(
        "jmat/studies/fitting.py",
        "first = int(causal) if settings.skip_first is None else settings.skip_first",
        "first = settings.skip_first or 0",
        "protocol jmat reads the first position of causal models where all tokens are read",
        "test_wiring_units.py",
    ),
    Change(
        "experiments/common.py",
        '            words.append(f"pieces of {FLAGS.piece_length} characters")',
        "            pass",
        "maps.json does not say that the text was cut into pieces",
        "test_pieces.py test_provenance.py",
    ),
    Change(
        "jmat/studies/cross_corpus/study.py",
        'most = max(row["n_fit"] for row in means)',
        'most = min(row["n_fit"] for row in means if row["n_fit"])',
        "the table of all pairs is of the fewest examples",
        "test_wiring_rest.py",
    ),
    Change(
        "jmat/studies/submodules/study.py",
        "resamples(held_out.positions, held_out.rows, seed",
        "resamples(held_out.positions, seed",
        "intervals of the parts' r2 are over examples",
        "test_wiring_parts.py",
    ),
    Change(
        "jmat/studies/submodules/study.py",
        "metric_rows(values, L, groups=held_out.rows, seed",
        "metric_rows(values, L, seed",
        "intervals of replaced sub-modules are over examples",
        "test_wiring_parts.py",
    ),
    Change(
        "experiments/tasks.py",
        "    print(results.table())\n",
        "    print(results.tables(results.rows))\n",
        "tasks prints no notes",
        "test_wiring_models.py",
    ),
    Change(
        "experiments/regularizer_study.py",
        'rows += [{"map": name, **row} for row in trained["rows"] if row["metric"] == "eval_loss"]',
        'rows += [{"map": name, **row} for row in trained["rows"] if row["metric"] == "held_out_loss"]',
        "the study reports the loss on the fit text",
        "test_wiring_models.py",
    ),
    Change(
        "jmat/data/examples.py",
        "    ends = split.positions + 1 == split.lengths[split.rows]\n",
        "    ends = np.zeros(len(where), bool)\n",
        "the token after a sentence's last is the first of the next one",
        "test_capture.py test_wiring_parts.py test_submodules.py",
    ),
    Change(
        "jmat/studies/prune/measure.py",
        "real = int(batch.lengths.sum())",
        "real = batch.tokens.size",
        "microseconds a token count padding",
        "test_prune_figures.py",
    ),
    Change(
        "jmat/studies/linearity/rows.py",
        "half = len(order) // 2  # no kind is at both ends",
        "half = 0",
        "a kind of token is among the least and the most linear ones",
        "test_linearity.py test_linearity_rows.py",
    ),
]
