//! What a process prints: read to its end, so that it never blocks, and kept up to a limit, so that
//! it costs neither memory nor disk.

use std::io::Read;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// Bytes at the end of a stream that are kept.
const END_BYTES: usize = 1 << 16;
/// Bytes at the start of a stream that are kept.
pub const START_BYTES: usize = 8 << 20;
/// Time for the rest of what a process printed to arrive once it has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What is kept of a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Its first [`START_BYTES`].
    Start,
    /// About its last 64 KiB.
    End,
}

/// A stream that has ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// What is kept of it.
    pub kept: Vec<u8>,
    /// Whether it was more.
    pub cut: bool,
}

/// Reads a stream to its end on a thread of its own.
pub fn drain(mut stream: impl Read + Send + 'static, keep: Kept) -> Receiver<Heard> {
    let (tell, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut all, mut piece) = (Heard::default(), vec![0; END_BYTES]);
        while let Ok(count @ 1..) = stream.read(&mut piece) {
            match keep {
                Kept::Start => {
                    let room = START_BYTES.saturating_sub(all.kept.len());
                    all.kept.extend_from_slice(&piece[..count.min(room)]);
                    all.cut |= count > room;
                }
                Kept::End => {
                    all.kept.extend_from_slice(&piece[..count]);
                    let over = all.kept.len().saturating_sub(END_BYTES);
                    all.kept.drain(..over);
                    all.cut |= over > 0;
                }
            }
        }
        // Nobody waits any more where it was held open for too long.
        let _ = tell.send(all);
    });
    heard
}

/// What a process that has ended printed. It is not waited for without end: what the process left
/// behind may hold its streams open.
pub fn heard(stream: Option<Receiver<Heard>>) -> Heard {
    stream.and_then(|stream| stream.recv_timeout(LAST_WORDS).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_flood_the_start_or_the_end_is_kept() {
        let flood: Vec<u8> = (0..3 * START_BYTES).map(|i| (i / 1000) as u8).collect();
        let kept = |keep| drain(std::io::Cursor::new(flood.clone()), keep).recv().unwrap();
        let (start, end) = (kept(Kept::Start), kept(Kept::End));
        assert!(start.cut && start.kept == flood[..START_BYTES]);
        assert!(end.cut && end.kept == flood[flood.len() - END_BYTES..]);
        let whole = drain(&b"all of it"[..], Kept::Start).recv().unwrap();
        assert_eq!(whole, Heard { kept: b"all of it".to_vec(), cut: false });
    }
}
