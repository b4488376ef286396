"""Memory of a GPU that processes of one host share (CUDA IPC), over NVLink or PCIe or within one GPU.

What is shared is what torch's allocator holds; an allocation is opened whole. CUDA keeps the memory of a process that
died until its last reader has closed it. Memory of expandable segments cannot be shared so.

Knows no ticket and no link. All use of the CUDA runtime beside torch is here: torch counts who reads what it shares,
and a reader that died would hold memory of the source for ever.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from distspec.transfer.aside import hold
from distspec.transfer.base import Computed
from distspec.transfer.window import NoSharedMemory, Region

_ANY_DIRECTION = 4
_PEER = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class CudaMemory:
    """Raises NoSharedMemory where the libraries that torch has loaded are not found."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(torch.cuda.get_device_properties(device).uuid)
        major = str(torch.version.cuda).partition(".")[0]
        try:
            self._runtime: Any = ctypes.CDLL(f"libcudart.so.{major}")
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoSharedMemory(str(error)) from None
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p

    def empty(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes] from torch's allocator, on the present stream."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def share(self, tensor: Tensor) -> Region:
        """The allocation that holds the tensor, and where in it the tensor begins, in bytes. Raises NoSharedMemory, as
        of an expandable segment."""
        base, handle = ctypes.c_uint64(), _Handle()
        self._call("cudaSetDevice", ctypes.c_int(tensor.device.index))  # the driver wants a context in this thread
        code = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), None, ctypes.c_uint64(tensor.data_ptr()))
        if code:
            raise NoSharedMemory(f"cuMemGetAddressRange: error {code}")
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(base.value))
        return Region(bytes(handle.bytes), tensor.data_ptr() - base.value)

    def open(self, handle: bytes) -> int:
        """handle: of 64 bytes, from `share` in another process. Returns the address of its allocation here, until
        `close`. Raises NoSharedMemory, as where the two GPUs do not reach each other."""
        found = ctypes.c_void_p()
        shared = _Handle.from_buffer_copy(handle)
        with torch.cuda.device(self.device):
            self._call("cudaIpcOpenMemHandle", ctypes.byref(found), shared, ctypes.c_uint(_PEER))
        return int(found.value or 0)

    def close(self, address: int) -> None:
        """address: from `open`; nothing reads there any more. Raises NoSharedMemory."""
        with torch.cuda.device(self.device):
            self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def copy(self, to: Tensor, address: int) -> None:
        """Fill `to`, contiguous, of the device or the host, with the to.nbytes from there, on the present stream.
        Raises NoSharedMemory."""
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        ends = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(address), ctypes.c_size_t(to.nbytes)
        self._call("cudaMemcpyAsync", *ends, ctypes.c_int(_ANY_DIRECTION), stream)

    def put(self, number: int, to: Tensor, computed: Computed) -> None:
        """to: int64 [1] of the device, written once `computed` is, on the present stream; waits for nothing."""
        hold(computed)
        to.fill_(number)

    def wait(self, address: int, count: int, stop: Tensor, found: Tensor) -> None:
        """Until the int64 at the address is `count`, on the present stream; not for long, nor once the host writes to
        `stop`. stop, found: int64 [1] of the host; what was there is written to `found`."""
        from distspec.kernels.pull import wait_for  # imports Triton

        wait_for(address, count, stop, found)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._runtime, name)(*arguments)
        if code:
            self._runtime.cudaGetLastError()  # it would be told to whoever asks next
            raise NoSharedMemory(f"{name}: {self._runtime.cudaGetErrorString(code).decode()}")
