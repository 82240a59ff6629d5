"""A folder of a Hugging Face model: its configuration as ours, its weights on the active mesh."""

from pathlib import Path
from typing import Any

import jax

from layers.config import DTypes, ModelConfig
from meshes.context import current
from paxlike.interop.hf_config import CONFIG, family_of, read_json, to_model
from paxlike.interop.loading import load
from paxlike.interop.safetensors import SafeTensors
from paxlike.model import Model, Params


def read_config(folder: Path, dtypes: DTypes | None = None) -> ModelConfig:
    """The model that a folder's `config.json` describes.

    Raises:
        ValueError: no such file, or something in it that we cannot represent, by name.
    """
    path = folder / CONFIG
    return to_model(read_json(path), str(path), dtypes)


def read_params(folder: Path, model: Model) -> Params:
    """The weights of a folder, sharded as the model's parameters are.

    Args:
        folder: `config.json` and safetensors.
        model: made of `read_config(folder)` under the active parallelism.

    Raises:
        ValueError: a file or tensor is damaged, missing, left over or of another shape.
    """
    family = family_of(read_json(folder / CONFIG), str(folder / CONFIG))
    mesh = current().mesh

    def on_devices(x: Any) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, x.sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    abstract = jax.tree.map(on_devices, model.abstract())
    return load(SafeTensors(folder), family.table, abstract, str(folder))
