"""Doors from other tools: scikit-learn's estimators, ONNX and torch.export files, Hugging Face's layout."""
