"""What engines that split a model over processes need of a streamed one."""
