"""What several packages share: argument checks, whole files, tensors as files, progress."""
