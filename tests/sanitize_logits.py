"""Every kernel over logits on small inputs, for compute-sanitizer.

for tool in memcheck racecheck initcheck synccheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 1 python tests/sanitize_logits.py
done
"""

from __future__ import annotations

import torch

import vocabshard as vs


def main() -> None:
    torch.manual_seed(0)
    calls = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        # few rows, and enough elements for the kernel that serves large problems; aligned rows and others
        for n, v, padded in ((3, 513, 513), (5, 1000, 1000), (2, 4099, 4104), (128, 65544, 65544), (128, 65537, 65537)):
            if n > 5 and dtype != torch.bfloat16:
                continue
            storage = torch.randn(n * padded + 1, device="cuda").mul_(4).to(dtype)
            for shift in (0, 1):
                x = storage[shift : shift + n * padded].view(n, padded)[:, :v].detach()
                target = torch.randint(0, v, (n,), device="cuda")
                for entropy in (False, True):
                    for temperature in (None, 0.7, torch.rand(n, device="cuda") + 0.5):
                        if n > 5 and (entropy or isinstance(temperature, torch.Tensor)):
                            continue
                        leaf = x.clone() if shift == 0 else x
                        leaf.requires_grad_()
                        out = vs.batch_invariant_logp(
                            leaf, target, temperature=temperature, return_lse=True, return_entropy=entropy
                        )
                        (out.logp.sum() + out.lse.sum() + (out.entropy.sum() if entropy else 0)).backward()
                        calls += 1
                rows = torch.randint(0, n, (2 * n,), device="cuda")
                leaf = x.clone().requires_grad_()
                vs.batch_invariant_logp(leaf, target[rows], rows=rows, validate=False).sum().backward()
    torch.cuda.synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
