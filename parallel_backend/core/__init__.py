"""Values that every room shares: degrees, spans, token order, devices, dtypes. No torch.distributed."""
