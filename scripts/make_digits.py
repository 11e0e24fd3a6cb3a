"""Write the digits that the package ships: python scripts/make_digits.py (needs scikit-learn).

The 1,797 images that scikit-learn takes from the UCI repository, as 8×8 counts 0..16, with a fifth of each
class set aside as the test part. The result is the same file every time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import selfconv.data
from selfconv.data.dataset import stratified

digits = load_digits()
images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
train, test = stratified(labels.astype(np.int64), 0.2, seed=0)
out = Path(selfconv.data.__file__).with_name("digits.npz")
np.savez_compressed(
    out,
    x_train=images[train],
    y_train=labels[train],
    x_test=images[test],
    y_test=labels[test],
    class_names=np.array([str(name) for name in digits.target_names]),
)
print(f"{out}: {len(train)} + {len(test)} images, {out.stat().st_size} bytes")
