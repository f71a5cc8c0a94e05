//! The numbers behind the policies, with their defaults. `torchobj/config.py` repeats the defaults; a test compares.

use std::time::Duration;

/// How a client reads, writes, waits and retries.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// Size of a range of a large read, and of the first parts of an upload, in bytes.
    pub part_bytes: u64,
    /// Objects below this are read by one request where the size is known.
    pub whole_below_bytes: u64,
    /// Requests at a time; with a cap, to begin with.
    pub max_in_flight: usize,
    /// How many requests at a time it may become where that pays; `None` where the number is fixed.
    pub max_in_flight_cap: Option<usize>,
    /// Whether a read whose answer is late is asked for a second time.
    pub hedge: bool,
    /// Memory for parts of one upload that are being filled or sent, in bytes; at least two parts.
    pub write_buffer_bytes: u64,
    /// How many bytes a second all uploads of an account may send; `None` where that is not limited.
    pub upload_bytes_per_s: Option<u64>,
    /// Attempts of one request, the first included; throttled ones are not counted.
    pub max_attempts: u32,
    /// No attempt begins later than this after the first; for commits of uploads in parts, `commit_timeout` replaces it.
    pub retry_timeout: Duration,
    /// From the request to the head of its answer, connecting included.
    pub first_byte_timeout: Duration,
    /// Between two arrivals of bytes, or two departures.
    pub idle_timeout: Duration,
    /// For all attempts to commit one upload in parts, with their permits and backoff, and for the checks whether a commit
    /// without a response made the object; however often the store sends white space meanwhile.
    pub commit_timeout: Duration,
    /// A body that brings fewer bytes a second, on average over `idle_timeout`, is read on over another connection; 0 for
    /// no such limit.
    pub min_bytes_per_s: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            // AWS, "Performance guidelines for Amazon S3": ranges of 8 or 16 MB.
            part_bytes: 8 << 20,
            whole_below_bytes: 16 << 20,
            // Fewer would be enough to begin with for many objects: the number grows within a second. One large object
            // read alone is over by then: at 80 MiB/s a connection, 128 MiB take 32 requests at once.
            max_in_flight: 64,
            // At 20 ms an answer, more than one process can receive.
            max_in_flight_cap: Some(256),
            hedge: true,
            write_buffer_bytes: 64 << 20,
            upload_bytes_per_s: None,
            max_attempts: 10,
            retry_timeout: Duration::from_secs(180),
            first_byte_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(20),
            // S3 assembles parts before it answers: "several minutes" (API reference, "CompleteMultipartUpload").
            commit_timeout: Duration::from_secs(900),
            // 64 requests at once on a line of 10 Mbit/s have 19 KiB/s each.
            min_bytes_per_s: 16 << 10,
        }
    }
}
