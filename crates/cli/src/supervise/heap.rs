//! The heap of a process that lives as long as its job.

/// Has all threads of this process share one heap, instead of up to eight for each core.
///
/// A launcher has a thread for every connection, and they allocate little. With a heap for each of
/// them a launcher of 16 workers grew by 3.6 MB an hour, though it kept nothing. With one
/// heap it was 1.2 MB (`bench/runs/2026-11-18-soak-launcher`). Threads that there are already keep
/// theirs, and others may get those: this comes before the first thread.
pub(crate) fn share_one() {
    // Other C libraries have one in any case.
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes two numbers, and refuses those that it does not know.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
