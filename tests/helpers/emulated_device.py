"""An accelerator emulated on the CPU, for tests of device separation and of values that the host reads.

`register` adds the device "emulated" to torch, on its key for external backends (PrivateUse1). A tensor there has real
strides and views, but its memory is a storage on the CPU, where operations run. As with CUDA, operations refuse tensors
of different devices, and the host may only read a value by an operation that `Reads` records. Streams, speed and
rounding are not emulated. Registration cannot be undone and changes what torch considers as the accelerator of the
process. Tests on the device therefore run in processes of their own.
"""

import math
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch._utils import _rebuild_device_tensor_from_cpu_tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
NAME = "emulated"
REGISTER = "_setup_privateuseone_for_python_backend"  # experimental in torch
IS_SUPPORTED = hasattr(backend_registration, REGISTER)
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_libraries = []  # torch removes the kernels of a library that is deleted
_recorders = []


class Reads(list):
    """Names of operations that let the host wait for values of the device, in order.

    Attributes:
        uploads: number of copies to the device for which the host waits, because they are not `non_blocking`.
    """

    uploads = 0

    def at_most(self, n):
        """Return whether there are at most n reads. CUDA synchronises more often: there only 0 has a meaning."""
        return len(self) <= (n if _libraries or not n else math.inf)


@contextmanager
def recorded_reads():
    """Record the operations in a block: `with recorded_reads() as reads`. On a GPU, record its synchronisations."""
    reads = Reads()
    with synchronisations(reads) if torch.cuda.is_available() else nullcontext():
        _recorders.append(reads)
        try:
            yield reads
        finally:
            _recorders.pop()


@contextmanager
def synchronisations(found):
    """Add the warnings of torch about synchronisations of a GPU to a list."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += [str(each.message) for each in caught if "synchronizing CUDA operation" in str(each.message)]


def register():
    """Add the device to torch, and return it."""
    getattr(backend_registration, REGISTER)(NAME)
    others, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((others, library))
    others.fallback(_run, "PrivateUse1")
    for op in filter(_is_computation, _composite_operations()):
        library.impl(op.name(), partial(_run, op), "PrivateUse1")
    for name in ("as_strided", "view", "_reshape_alias", "unfold"):
        library.impl(name, _view_by(getattr(aten, name).default), "PrivateUse1")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy, "PrivateUse1")
    _override("data_ptr", lambda x: memory_of(x).data_ptr())
    _override("__deepcopy__", lambda x, memo: memo.setdefault(id(x), _copied(x)))
    _override("__reduce_ex__", lambda x, protocol: (_rebuild_device_tensor_from_cpu_tensor, _saved(x)))
    return torch.device(NAME, 0)


def _override(method, on_device):
    """Replace a method of tensors that accesses the storage, which has no address and no size here."""
    original = getattr(torch.Tensor, method)

    def either(x, *arguments):
        return (on_device if x.device.type == NAME else original)(x, *arguments)

    setattr(torch.Tensor, method, either)


def _copied(x):
    return x.detach().clone().requires_grad_(x.requires_grad)


def _saved(x):
    """Return the arguments from which `torch.load` restores a tensor."""
    return x.detach().cpu(), x.dtype, str(x.device), x.requires_grad


def _composite_operations():
    """Yield operations that torch implements by other operations if the device has no kernel."""
    for kind in ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"):
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(kind):
            if name.startswith("aten::") and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
                name, _, overload = name.removeprefix("aten::").partition(".")
                yield getattr(getattr(aten, name), overload or "default")


def _is_computation(op):
    """Whether an operation computes values from tensors on one device, instead of a copy or a view."""
    arguments, results = op._schema.arguments, op._schema.returns
    return (
        op is not aten.copy_.default
        and any("Tensor" in str(argument.type) for argument in arguments)
        and all(argument.name != "device" for argument in arguments)
        and all(result.alias_info is None or result.alias_info.is_write for result in results)
    )


def memory_of(x):
    """Return a CPU tensor with the memory of a tensor on the device."""
    offset, shape, stride = _layout(x)
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().memory, offset, shape, stride)


def _layout(x):
    return x.storage_offset(), x.shape, x.stride()


def _on_device(memory):
    """Return a tensor on the device with the memory of a CPU tensor."""
    x = torch._C._acc.create_empty_tensor(memory.shape, memory.dtype)
    x.untyped_storage().memory = memory.untyped_storage()
    offset, shape, stride = _layout(memory)
    return torch.as_strided(x, shape, stride, offset)


def _view_by(op):
    # The kernels of "meta" tensors create views without access to memory.
    return lambda *arguments: op.redispatch(_META, *arguments)


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return _on_device(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return _on_device(torch.empty_strided(size, stride, dtype=dtype))


def _copy(source, target, non_blocking=False):
    to_device, from_device = (x.device.type == NAME for x in (target, source))
    if from_device and not to_device:
        _record("copy to the CPU")
    if to_device and not from_device and not non_blocking:
        for reads in _recorders:
            reads.uploads += 1
    _memory(target).copy_(_memory(source))
    return target


def _memory(x):
    return memory_of(x) if x.device.type == NAME else x


def _record(name):
    for reads in _recorders:
        reads.append(name)


def _run(op, *arguments, **options):
    """Run an operation on the memory of its arguments."""
    tensors = {}  # of the device, by their memory

    def unwrapped(x):
        if isinstance(x, torch.device):
            return torch.device("cpu") if x.type == NAME else x
        if x.device.type == NAME:
            memory = memory_of(x)
            tensors[id(memory)] = (x, memory)
            return memory
        if x.dim():  # kernels of accelerators accept numbers on the CPU
            raise RuntimeError(f"{op.name()} got tensors on {NAME} and on {x.device}")
        return x

    def wrapped(result):
        if id(result) not in tensors:
            return _on_device(result)
        x, memory = tensors[id(result)]  # operations in place and with `out` return an argument
        if _layout(x) != _layout(memory):  # `out` was resized, or the axes of a tensor changed in place
            x.data = _on_device(memory)
        return x

    kinds = (torch.Tensor, torch.device)
    given, given_options = tree_map_only(kinds, unwrapped, (arguments, options))
    if _reads_values(op, given, given_options):
        _record(op.name())
    return tree_map_only(torch.Tensor, wrapped, op(*given, **given_options))


def _reads_values(op, arguments, options):
    """Whether the result, its shape, or an error depends on values that CUDA copies to the host."""
    if op.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
        _, indices, *values = arguments[:3]
        is_masked_fill = bool(values) and values[0].numel() == 1
        return not is_masked_fill and any(x is not None and x.dtype == torch.bool for x in indices)
    if op is aten.repeat_interleave.Tensor and options.get("output_size") is not None:
        return False
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return op is aten._linalg_check_errors.default or not tags.isdisjoint(op.tags)
