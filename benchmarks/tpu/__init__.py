"""What steps are as programs for TPUs, compiled without one."""
