"""What is asked of torch's backend of NCCL is there, in builds that have one; no device is
needed."""

import pytest
import torch
import torch.distributed as dist

from funcpipe._src.devices.nccl import has_nccl, nccl

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not has_nccl(), reason="needs a torch with NCCL"),
]


def test_its_options_and_operations():
    assert all(
        hasattr(dist.ProcessGroupNCCL, name)
        for name in (
            "send",
            "recv",
            "alltoall",
            "abort",
            "size",
            "options",
            "eager_connect_single_device",
        )
    )
    options = dist.ProcessGroupNCCL.Options()
    assert hasattr(options, "is_high_priority_stream")
    assert hasattr(options.config, "max_ctas")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="GPU"):  # and of nothing else
            nccl(dist.HashStore(), 0, 2)
