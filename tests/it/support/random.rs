//! Reproducible random numbers: a failing test prints its seed.

/// xorshift64*.
pub struct Random(u64);

impl Random {
    /// Seeded by `REDLATCH_SEED`, or by the clock.
    pub fn new() -> Random {
        let seed =
            std::env::var("REDLATCH_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| {
                std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64
            });
        println!("REDLATCH_SEED={seed}");
        Random(seed | 1)
    }

    /// Returns the same numbers for the same seed, and unrelated ones for the next seed.
    pub fn seeded(seed: u64) -> Random {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        random.below(1);
        random
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16) % bound
    }
}
