"""Integrations with other tools: scikit-learn, ONNX and torch.export files, Hugging Face."""
