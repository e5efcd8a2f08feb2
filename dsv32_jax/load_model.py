"""Load a model from a folder: the official layout, or a training run and its checkpoints."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from orbax.checkpoint import checkpoint_utils

from dsv32_jax import checkpoint_tree, json_files, manifest, parameters
from dsv32_jax.config import Dtype, ModelConfig
from dsv32_jax.convert import restore, run_folder, storage, target
from dsv32_jax.convert.hf_config import read_config
from dsv32_jax.convert.load import load_official
from dsv32_jax.convert.run_folder import CHECKPOINTS, CONFIG, RunFolder
from dsv32_jax.convert.storage import Location
from dsv32_jax.model import DeepSeekV32
from dsv32_jax.parameters import Parameters
from dsv32_jax.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

KINDS = "a folder in the official layout, a training run or converted checkpoint, its checkpoints, or one of them"


def load_model(
    path: Location, dtype: Dtype = "float32", *, mesh: Mesh | None = None, narrow: bool = False
) -> DeepSeekV32:
    """Load a model for running it.

    Args:
        path: A folder in the official layout (config.json with model_type and safetensors); or the folder of a run or
            of a converted checkpoint (config.json with the model, checkpoints/), its checkpoints folder, or one step in
            there. Of several steps the newest whole one is taken; damaged ones are passed over with a warning.
        dtype: Dtype of activations and matrix products, in place of the config's.
        mesh: Where the parameters go, each device reading its own part (of an official folder, all of it); None is
            the first device.
        narrow: Keep each parameter in the dtype of its products instead of float32, for running only.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If there is no such folder or no checkpoint in it.
        WorkFailedError: If there are checkpoints and none is whole.
        ValueError: If the folder is of neither kind, its config cannot be read, or the arrays do not fit it.
    """
    path = storage.absolute(path)
    if not path.exists():
        raise FileNotFoundError(f"no folder {path}")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; needed is {KINDS}")

    def place(cfg: ModelConfig) -> Parameters:
        return layout(cfg, mesh, narrow=narrow)

    if path == run_folder.folder_of(path):
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path} has no {CONFIG}; needed is {KINDS}")
        if "model_type" in json_files.read_object(path / CONFIG):
            cfg = replace(read_config(path), dtype=dtype)
            arrays = parameters.flatten(load_official(path, cfg))
            return parameters.assemble(cfg, jax.tree.map(_put, arrays, place(cfg)))
        if not (path / CHECKPOINTS).is_dir():
            raise ValueError(
                f"{path} has no model_type in its {CONFIG}, as the official layout, and no {CHECKPOINTS} "
                "folder, as a training run that has saved"
            )
    return _load_step(run_folder.find(storage.as_path(path), checksums=True), dtype, place)


def layout(cfg: ModelConfig, mesh: Mesh | None, *, narrow: bool) -> Parameters:
    """Return shape, dtype and place of every parameter of a model that is loaded for running.

    Args:
        cfg: The model.
        mesh: Where the parameters go; None is the first device.
        narrow: Keep each parameter in the dtype of its products instead of float32.

    Returns:
        Parameters of jax.ShapeDtypeStruct with shardings.
    """
    shapes = parameters.abstract(cfg)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = (
        parameters.shardings(cfg, mesh, training=False)
        if mesh
        else jax.tree.map(lambda _: first, shapes)
    )

    def describe(name: str, shape: Any, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        dtype = parameters.product_dtype(name, cfg) if narrow else shape.dtype
        return jax.ShapeDtypeStruct(shape.shape, jnp.dtype(dtype), sharding=where)

    weights = {n: describe(n, x, places.weights[n]) for n, x in shapes.weights.items()}
    bias = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places.router_bias[n])
        for n, x in shapes.router_bias.items()
    }
    return Parameters(weights, bias)


def _put(array: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(array.astype(wanted.dtype), wanted.sharding)


def load_tokenizer_of(path: Location, override: str | None = None) -> Tokenizer:
    """Load the tokenizer that goes with a checkpoint.

    Args:
        path: As for `load_model`.
        override: "bytes", or the path of a tokenizer.json or of its folder, to use instead.

    Returns:
        The tokenizer: the folder's own tokenizer.json, a converted checkpoint's, or the one a run was trained with.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it cannot be read.
    """
    if override is not None:
        return load_tokenizer(override)
    if not path.exists():
        raise FileNotFoundError(f"no folder {storage.absolute(path)}")
    run, official = folders_beside(path)
    for folder in (run, official):
        if (folder / TOKENIZER_FILE).is_file():
            return load_tokenizer(str(folder))
    if (run / CONFIG).is_file():
        named = run_folder.tokenizer_name(json_files.read_object(run / CONFIG))
        if named is not None:
            return load_tokenizer(named)
    raise FileNotFoundError(f"{path} has no {TOKENIZER_FILE} and names none; give --tokenizer")


def saved_dtype(path: Location) -> Dtype:
    """Return the dtype that a checkpoint's model is meant to run in.

    Args:
        path: As for `load_model`.

    Returns:
        A run's own; of official weights, converted or not, what their config.json names, else "bfloat16".

    Raises:
        ValueError: If a config cannot be read.
    """
    run, official = folders_beside(path)
    for folder in (official, run):
        raw = json_files.read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        if "model_type" in raw:
            named = raw.get("torch_dtype", raw.get("dtype"))
            return "float32" if named == "float32" else "bfloat16"
        model = raw.get("model")
        if isinstance(model, dict) and model.get("dtype") in get_args(Dtype):
            return model["dtype"]
    return "bfloat16"


def folders_beside(path: Location) -> tuple[Location, Location]:
    """Return where a checkpoint's other files may lie.

    Args:
        path: As for `load_model`.

    Returns:
        (the run's or the official folder itself, the folder in it that a conversion carries official files in).
    """
    run = run_folder.folder_of(storage.absolute(path))
    return run, run / target.OFFICIAL


def _load_step(
    run: RunFolder, dtype: Dtype, place: Callable[[ModelConfig], Parameters]
) -> DeepSeekV32:
    """Restore the parameters, and nothing else of the training state."""
    step, cfg = run.step, replace(run.cfg, dtype=dtype)
    like = {"parameters": place(cfg)}
    wanted = checkpoint_tree.abstract_of(checkpoint_tree.to_nested_dict(like))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        saved = checkpointer.metadata(step / manifest.STATE).item_metadata
        wide = checkpoint_tree.to_nested_dict({"parameters": parameters.abstract(cfg)})
        mismatch = checkpoint_tree.find_mismatch(saved.tree, wide, partial=True)
        if mismatch:
            raise ValueError(f"checkpoint {step} does not fit the run's {CONFIG}: {mismatch}")
        if restore.is_quantised(saved.tree):
            restored = restore.restore(step / manifest.STATE, wanted)
        else:
            restored = checkpointer.restore(
                step / manifest.STATE,
                args=ocp.args.PyTreeRestore(
                    item=wanted,
                    restore_args=checkpoint_utils.construct_restore_args(wanted),
                    partial_restore=True,
                ),
            )
    logger.info("loaded checkpoint %s", step)
    return parameters.assemble(cfg, checkpoint_tree.from_nested_dict(restored, like)["parameters"])
