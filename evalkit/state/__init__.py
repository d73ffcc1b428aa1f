"""What is on disk: snapshots, the ledger, fleet records."""
