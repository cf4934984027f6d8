"""Many runs: jobs in parallel, and the two commands that need them, bench and tune."""
