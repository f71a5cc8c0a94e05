//! The memory use of an arena. Measures nothing; `owner` does.

/// Memory use of an arena, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Limit of `used`.
    pub budget: u64,
    /// Bytes of all segments.
    pub used: u64,
    /// Bytes of all segments, and of the free memory that is kept for the next ones.
    pub resident: u64,
    /// Bytes of segments that were granted to workers and not returned; those on their way to the trainer included.
    pub granted: u64,
    /// Number of segments that the trainer adopted without a copy.
    pub transferred: u64,
    /// Number of segments that the trainer copied, because their worker still mapped them.
    pub copied: u64,
    /// Bytes of all blocks, which hold batches of workers; not part of `used`. Without blocks that were discarded after a
    /// fork.
    pub blocks: u64,
    /// Part of `blocks` that workers or the trainer use.
    pub used_blocks: u64,
    /// Number of blocks that were granted.
    pub granted_blocks: u64,
}
