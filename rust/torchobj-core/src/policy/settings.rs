//! The settings of the policies, with their defaults. `torchobj/config/store.py` repeats the defaults; a test compares them.

use std::time::Duration;

/// Settings of a client for reads, writes, timeouts and retries.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// Size of a range of a large read, and of the first parts of an upload, in bytes.
    pub part_bytes: u64,
    /// Objects of a known size below this are read by one request.
    pub whole_below_bytes: u64,
    /// Maximum number of concurrent requests; its start value if there is a cap.
    pub max_in_flight: usize,
    /// Up to this value the limit adapts to the throughput; `None` for a fixed limit.
    pub max_in_flight_cap: Option<usize>,
    /// Whether a read is sent a second time after the hedge delay.
    pub hedge: bool,
    /// Whether whole objects are compared with the checksum in the response, if it has one.
    pub verify_checksums: bool,
    /// Memory for the parts of one upload that are being filled or sent, in bytes; at least two parts.
    pub write_buffer_bytes: u64,
    /// Rate limit of all uploads of an account; `None` for no limit.
    pub upload_bytes_per_s: Option<u64>,
    /// Maximum number of attempts of one request, including the first. Throttled attempts are not counted.
    pub max_attempts: u32,
    /// No attempt begins later than this after the first; for commits of uploads in parts, `commit_timeout` replaces it.
    pub retry_timeout: Duration,
    /// Timeout from the request to the head of its response, including the connect.
    pub first_byte_timeout: Duration,
    /// Maximum time without a byte received or sent.
    pub idle_timeout: Duration,
    /// Total timeout of all attempts to commit one upload in parts, including their permits and backoffs, and of the checks
    /// whether a commit without a response made the object. White space that the store sends meanwhile does not extend it.
    pub commit_timeout: Duration,
    /// If a body arrives at a lower rate, on average over `idle_timeout`, the rest is read over another connection; 0 for
    /// no limit.
    pub min_bytes_per_s: u64,
}

/// Minimum limit of each rank of a host, for any number of ranks.
const MIN_IN_FLIGHT: usize = 4;

impl Policy {
    /// Returns the policy of one of `ranks` processes of a host. The start and the cap of an adaptive limit are divided by
    /// `ranks`. A fixed limit does not change.
    #[must_use]
    pub fn shared_by(self, ranks: usize) -> Self {
        let share = |limit: usize| (limit / ranks.max(1)).max(MIN_IN_FLIGHT.min(limit));
        match self.max_in_flight_cap {
            Some(cap) => Self { max_in_flight: share(self.max_in_flight), max_in_flight_cap: Some(share(cap)), ..self },
            None => self,
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            // AWS, "Performance guidelines for Amazon S3": ranges of 8 or 16 MB.
            part_bytes: 8 << 20,
            whole_below_bytes: 16 << 20,
            // A read of many objects could start with fewer: the limit grows within a second. A read of one large object
            // ends before that: at 80 MiB/s per connection, 128 MiB need 32 concurrent requests.
            max_in_flight: 64,
            // At 20 ms per response, 25,600 objects per second: more than one process can receive (19,400 of 110 KiB).
            max_in_flight_cap: Some(512),
            hedge: true,
            verify_checksums: false,
            write_buffer_bytes: 64 << 20,
            upload_bytes_per_s: None,
            max_attempts: 10,
            retry_timeout: Duration::from_secs(180),
            first_byte_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(20),
            // S3 assembles parts before it answers: "several minutes" (API reference, "CompleteMultipartUpload").
            commit_timeout: Duration::from_secs(900),
            // 64 concurrent requests over 10 Mbit/s receive 19 KiB/s each.
            min_bytes_per_s: 16 << 10,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_of_a_host_share_a_limit_that_adapts_and_not_a_fixed_one() {
        let shared = |start, cap, ranks| {
            let policy = Policy { max_in_flight: start, max_in_flight_cap: cap, ..Policy::default() }.shared_by(ranks);
            (policy.max_in_flight, policy.max_in_flight_cap)
        };
        assert_eq!(shared(64, Some(256), 1), (64, Some(256)));
        assert_eq!(shared(64, Some(256), 8), (8, Some(32)));
        assert_eq!(shared(64, Some(256), 1000), (4, Some(4)));
        assert_eq!(shared(2, Some(3), 8), (2, Some(3)));
        assert_eq!(shared(64, None, 8), (64, None));
    }
}
