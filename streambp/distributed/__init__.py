"""What engines do to parameters and host memory."""
