"""Which operators need a wider format: where rounding hurts, measured on a prepared model."""
