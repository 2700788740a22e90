//! What a process prints: read to its end, so that it never blocks, and kept up to a limit, so that
//! it costs neither memory nor disk.

use std::io::Read;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// Bytes at the end of a stream that are kept.
const END_BYTES: usize = 1 << 16;
/// Bytes at the start of a stream that are kept.
pub const START_BYTES: usize = 8 << 20;
/// Time for the rest of the output to arrive once the process has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

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
pub struct Captured {
    /// What is kept of it.
    pub kept: Vec<u8>,
    /// Whether it was more.
    pub cut: bool,
    /// How much it was.
    pub bytes: u64,
}

/// Reads a stream to its end on a thread of its own.
pub fn drain(mut stream: impl Read + Send + 'static, keep: Kept) -> Receiver<Captured> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut all, mut piece) = (Captured::default(), vec![0; END_BYTES]);
        while let Ok(count @ 1..) = stream.read(&mut piece) {
            all.bytes += count as u64;
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
        // Fails where the stream was held open for longer than the receiver waited.
        let _ = sender.send(all);
    });
    receiver
}

/// What a process that has ended printed. It is not waited for without end: what the process left
/// behind may hold its streams open.
pub fn captured(stream: Option<Receiver<Captured>>) -> Captured {
    stream.and_then(|stream| stream.recv_timeout(DRAIN_TIMEOUT).ok()).unwrap_or_default()
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
        assert_eq!([start.bytes, end.bytes], [flood.len() as u64; 2]);
        assert!(end.cut && end.kept == flood[flood.len() - END_BYTES..]);
        let whole = drain(&b"all of it"[..], Kept::Start).recv().unwrap();
        assert_eq!(whole, Captured { kept: b"all of it".to_vec(), cut: false, bytes: 9 });
    }
}
