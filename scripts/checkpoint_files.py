"""Files of checkpoints, Megatron-LM's (torch_dist) and this program's, for scripts/convert_megatron_checkpoint.py."""

import io
import json
import pathlib
import pickle
import struct
import types
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# Single processes are what the converter is for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

SAFETENSORS_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
TORCH_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}


class ConversionError(Exception):
    """What the user has to know; one line."""


def check(condition, message):
    if not condition:
        raise ConversionError(message)


# ---- Megatron-LM's side: objects -------------------------------------------------------------------------------------


class _Placeholder:
    """Stands for an object of a class that is not installed here (enums of Megatron-LM, mostly)."""

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, state):
        pass


class _ObjectReader(pickle.Unpickler):
    """Builds tensors and plain values only."""

    PLAIN = {
        ("argparse", "Namespace"),
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module, name):
        if (module, name) in self.PLAIN or (
            module == "torch" and (isinstance(getattr(torch, name, None), torch.dtype) or name.endswith("Storage"))
        ):
            return super().find_class(module, name)
        return type(name, (_Placeholder,), {"__module__": module})


_OBJECT_PICKLE = types.SimpleNamespace(
    Unpickler=_ObjectReader, load=lambda file, **_: _ObjectReader(file).load(), __name__="pickle"
)


class MegatronCheckpoint:
    """One iteration's folder of a torch_dist checkpoint, opened for reading."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        check((self.folder / ".metadata").is_file(), f"{folder} is no torch_dist checkpoint: it has no .metadata")
        marker = self.folder / "metadata.json"
        check(marker.is_file(), f"{folder} is not complete, or not written by Megatron-LM: it has no metadata.json")
        backend = json.loads(marker.read_text(encoding="utf-8")).get("sharded_backend")
        check(backend == "torch_dist", f"{marker} says sharded_backend {backend}; only torch_dist is converted")
        self.reader = FileSystemReader(str(self.folder))
        self.metadata = self.reader.read_metadata()
        self.entries = self.metadata.state_dict_metadata
        self.places = {index.fqn: place for index, place in self.metadata.storage_data.items()}

    def tensors(self):
        return {key: entry for key, entry in self.entries.items() if isinstance(entry, TensorStorageMetadata)}

    def tensor(self, key):
        entry = self.entries[key]
        values = {key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)}
        dcp.load(values, storage_reader=FileSystemReader(str(self.folder)), no_dist=True)
        return values[key]

    def object(self, key):
        """The value of a sharded object."""
        place = self.places[key]
        with open(self.folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            blob = io.BytesIO(file.read(place.length))
        return torch.load(blob, map_location="cpu", weights_only=False, pickle_module=_OBJECT_PICKLE)

    def common(self):
        """Arguments, iteration, optimizer groups and schedule."""
        old = self.folder / "common.pt"
        if old.is_file():
            return torch.load(old, map_location="cpu", weights_only=False, pickle_module=_OBJECT_PICKLE)
        check(
            "common_state/shard_0_1" in self.places, f"{self.folder} has neither common.pt nor the object common_state"
        )
        return self.object("common_state/shard_0_1")[0]


def find_megatron(path):
    """The iteration's folder that a path means, and whether it is a release."""
    path = pathlib.Path(path)
    if (path / ".metadata").is_file():
        return path, path.name == "release"
    tracker = path / "latest_checkpointed_iteration.txt"
    check(tracker.is_file(), f"{path} is no checkpoint: it has neither .metadata nor {tracker.name}")
    text = tracker.read_text(encoding="utf-8").strip()
    check(text == "release" or text.isdigit(), f"{tracker} holds '{text}', which is neither an iteration nor 'release'")
    return (path / "release", True) if text == "release" else (path / f"iter_{int(text):07d}", False)


# ---- this program's side ---------------------------------------------------------------------------------------------


class SafetensorsWriter:
    """Files of whole tensors, a few gigabytes each."""

    LIMIT = 2 << 30

    def __init__(self, folder):
        self.folder, self.pending, self.bytes, self.files = pathlib.Path(folder), [], 0, 0

    def add(self, name, tensor):
        self.pending.append((name, tensor.contiguous()))
        self.bytes += tensor.numel() * tensor.element_size()
        if self.bytes >= self.LIMIT:
            self.flush()

    def flush(self):
        if not self.pending:
            return
        header, offset = {}, 0
        for name, tensor in self.pending:
            size = tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": SAFETENSORS_TYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(self.folder / f"part_{self.files:05d}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, tensor in self.pending:
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        self.pending, self.bytes, self.files = [], 0, self.files + 1


class NativeCheckpoint:
    """A checkpoint of this program, opened for reading; gpt_tool inspect --verify checks its bytes."""

    def __init__(self, path):
        path = pathlib.Path(path)
        if not (path / "manifest.json").is_file():
            tracker = path / "latest_checkpointed_iteration.txt"
            check(
                tracker.is_file(),
                f"{path} is no checkpoint of this program: it has neither manifest.json nor {tracker.name}",
            )
            text = tracker.read_text(encoding="utf-8").strip()
            path = path / ("release" if text == "release" else f"iter_{int(text):07d}")
        self.folder = path
        self.manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        self.headers = {}

    def _header(self, file):
        if file not in self.headers:
            with open(self.folder / file, "rb") as opened:
                length = struct.unpack("<Q", opened.read(8))[0]
                self.headers[file] = (json.loads(opened.read(length)), 8 + length)
        return self.headers[file]

    def tensor(self, name):
        entry = self.manifest["tensors"][name]
        whole = torch.empty(entry["shape"], dtype=TORCH_TYPES[entry["dtype"]])
        for piece in entry["pieces"]:
            header, start = self._header(piece["file"])
            begin, end = header[piece["key"]]["data_offsets"]
            with open(self.folder / piece["file"], "rb") as opened:
                opened.seek(start + begin)
                values = torch.frombuffer(bytearray(opened.read(end - begin)), dtype=whole.dtype).reshape(
                    piece["shape"]
                )
            whole[tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"]))] = values
        return whole
