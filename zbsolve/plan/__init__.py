"""The plan file: programs with messages and a certificate."""
