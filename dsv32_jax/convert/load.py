"""Read an official-layout checkpoint straight into a model."""

import jax.numpy as jnp
import numpy as np

from dsv32_jax import parameters
from dsv32_jax.config import ModelConfig
from dsv32_jax.convert import slots as slot_table
from dsv32_jax.convert import source, storage, transfer
from dsv32_jax.convert.hf_config import parse_named, read_raw, scale_format
from dsv32_jax.convert.slots import WIDE
from dsv32_jax.convert.storage import Location
from dsv32_jax.model import DeepSeekV32


def load_official(folder: Location, cfg: ModelConfig | None = None) -> DeepSeekV32:
    """Load a checkpoint in the official layout, in host memory: meant for small ones and checks.

    Args:
        folder: Holds config.json and safetensors files (FP8, bf16, float32), with their index where there are several.
        cfg: Overrides the folder's own config, to change what does not alter the parameters (dtype, FP8 options).

    Returns:
        The model, float32 parameters, FP8 weights times their scales. An MTP layer in the files is loaded if the config
        declares it, else skipped.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a tensor or a scale is missing, unknown or of the wrong shape or dtype, or a file cannot be read.
        WorkFailedError: If a weight is not finite, a scale not allowed, or an MTP copy differs from the main model.
    """
    raw = read_raw(folder)
    cfg = cfg or parse_named(raw, folder)
    power_of_two = scale_format(raw) == "ue8m0"
    source.check_counts(storage.as_path(folder), cfg)
    table = slot_table.slots(cfg)
    found = source.find_tensors(storage.as_path(folder), table, cfg)
    arrays = {slot.place.path: np.empty(slot.shape, np.float32) for slot in table.values()}
    for name, slot in table.items():
        if slot.place.copy:
            original = slot_table.original(table, slot)
            transfer.check_copy(slot, found[name].weight, found[original.name].weight)
            continue
        scales = transfer.read_scales(found[name], power_of_two=power_of_two)
        for part in range(slot.parts):
            chunk, _ = transfer.read_part(slot, part, found[name], scales, WIDE["float32"])
            at = slot.slices(part)
            arrays[slot.place.path][at] = chunk.reshape(slot.chunks)
    groups = parameters.abstract(cfg)
    named = parameters.Parameters(*({n: jnp.asarray(arrays[n]) for n in group} for group in groups))
    return parameters.assemble(cfg, named)
