"""What several packages share: argument checks, devices, whole files, tensors and figures as files, progress."""
