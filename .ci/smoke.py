"""What an installed wheel must be able to do, with nothing of the checkout in reach."""

from pathlib import Path

import torch

import mmlda
from mmlda.report import build

here = Path(mmlda.__file__).resolve()
assert "site-packages" in here.parts, f"imported from the checkout, not from the wheel: {here}"
assert (here.parent / "py.typed").is_file()

mu = mmlda.generate_opt_means(C=100.0, p=64, L=10)
gram = mu @ mu.T
assert torch.allclose(gram.diagonal(), torch.full((10,), 100.0, dtype=torch.float64))
assert abs(float(gram[0, 1]) + 100 / 9) < 1e-9
assert round(mmlda.theory.relative_efficiency(zeta=0.0, delta=2.0, p=1), 3) == 0.899

train, test = mmlda.data.load("digits")
model = mmlda.Classifier(mmlda.models.conv_net(), mmlda.MaxMahalanobisHead(num_classes=10, dim=32))
mmlda.fit(model, train, mmlda.Recipe(steps=80, optimizer="adam", lr=3e-3), show=False)
clean = mmlda.accuracy(model, test).accuracy
assert clean > 0.9, clean
attacked = mmlda.attacks.BIM(eps=0.2)(model, test.pixels(), test.labels)
assert float(attacked.success.float().mean()) > 0.3

found = mmlda.evaluate(model, test, [mmlda.attacks.FGSM(eps=0.1)], n=50, out="evaluation", show=False)
assert found.attacks[0].value < found.clean.value
verdict = mmlda.audit(model, test, eps=0.3, n=30, show=False)
assert verdict.verdict == "none", verdict
verdict.to_result().save("evaluation")
page = build("evaluation", "report.html").read_text(encoding="utf-8")
assert "Is the robustness real?" in page and "<style>" in page

shipped = mmlda.load("mnist-mmlda")
assert shipped(torch.rand(1, 1, 28, 28)).shape == (1, 10)
print(f"mmlda {mmlda.__version__}: the wheel works ({100 * clean:.1f}% on digits)")
