"""Names, schemas, locks, atomic files, errors: what everything else stands on."""
