"""Wrong changes of files of other libraries: pickles, their tensors, lenses and maps."""

from tests.mutation import Change

_PICKLES, _MAPS = "test_torch_files.py", "test_foreign_maps.py"

CHANGES = [
    Change(
        "jmat/checkpoint/pickles.py",
        "if not isinstance(key, str | int):",
        "if False:",
        "keys of a pickle may take forever to hash",
        _PICKLES,
    ),
    Change(
        "jmat/checkpoint/stored_tensors.py",
        "if size and (last >= self.storage.count or size > self.storage.count):",
        "if size and last >= self.storage.count:",
        "one number of a file may stand for many",
        _PICKLES,
    ),
    Change(
        "jmat/checkpoint/stored_tensors.py",
        "self.left -= tensor.nbytes",
        "self.left -= 0",
        "tensors of one storage may take any memory together",
        _PICKLES,
    ),
    Change(
        "jmat/checkpoint/stored_tensors.py",
        "[math.prod(sizes[:axis]) for axis in range(len(sizes))]",
        "[math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]",
        "arrays in Fortran order are read in C order",
        _PICKLES,
    ),
    Change(
        "jmat/checkpoint/torch_files.py",
        "if not self.checked and zlib.crc32(self.content) != self.checksum:",
        "if False:",
        "changed numbers of a zip are read",
        _PICKLES,
    ),
    Change(
        "jmat/checkpoint/torch_files.py",
        "if size > _MOST_DIRECTORY:",
        "if False:",
        "a zip may have any number of members",
        _PICKLES,
    ),
    Change(
        "jmat/checkpoint/torch_writing.py",
        "padding = -start % _ALIGNED",
        "padding = 0",
        "members are not aligned for PyTorch to map them",
        _PICKLES,
    ),
    Change(
        "jmat/maps/lens_files.py",
        'maps[f"jacobian.{int(layer) + 1}.{target}"]',
        'maps[f"jacobian.{int(layer)}.{target}"]',
        "a Jacobian lens reads the input of its block",
        _MAPS,
    ),
    Change(
        "jmat/maps/lens_files.py",
        "jnp.asarray(square(matrices[layer], path, what, model.config.width).T)",
        "jnp.asarray(square(matrices[layer], path, what, model.config.width))",
        "a Jacobian is applied from the other side",
        _MAPS,
    ),
    Change(
        "jmat/maps/lens_files.py",
        "W = np.eye(D, dtype=np.float32) + weight.T",
        "W = weight.T",
        "a tuned lens is no residual",
        _MAPS,
    ),
    Change(
        "jmat/maps/lens_files.py",
        "if stored_hash is not None and ours is not None and stored_hash != ours:",
        "if False:",
        "the tuned lens of another model of the same size is taken",
        _MAPS,
    ),
    Change(
        "jmat/maps/lens_files.py",
        "matrices[layer - 1] = W.T.astype(np.float16)",
        "matrices[layer] = W.T.astype(np.float16)",
        "a Jacobian lens is written for the next block",
        _MAPS,
    ),
    Change(
        "jmat/maps/pickled_maps.py",
        "return Linear(jnp.asarray(W.T), jnp.asarray(bias))",
        "return Linear(jnp.asarray(W), jnp.asarray(bias))",
        "NBL's maps are applied from the other side",
        _MAPS,
    ),
    Change(
        "jmat/maps/pickled_maps.py",
        'return {f"ln_1.{i}": Identity(), f"attn.{i}"',
        'return {f"attn.{i}"',
        "NBL's maps read the norm's output",
        _MAPS,
    ),
    Change(
        "jmat/models/site_names.py",
        'return f"block.{i - 1}" if i else "embed"',
        'return f"block.{i}"',
        "the stream into a block is that behind it",
        "test_site_names.py",
    ),
    Change(
        "jmat/models/site_names.py",
        "return part != _MID or not config.parallel",
        "return True",
        "parallel blocks have a stream between attention and feed-forward",
        "test_site_names.py",
    ),
    Change(
        "jmat/models/sites.py",
        "if site in exact:",
        "if False:",
        "of two names of one site the last counts",
        "test_site_names.py",
    ),
]
