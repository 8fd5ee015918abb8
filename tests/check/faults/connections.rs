//! Faults of the connections between one worker and all servers: reset, half open, one way, slow,
//! cut, or with late or lost messages.

use std::time::Duration;

use tokio::time::sleep;

use super::Scene;
use crate::history::Time;
use crate::plan::{Fault, TTL};
use crate::support::Proxy;

pub async fn disturb(mut scene: Scene<'_>, proxies: &[Proxy]) {
    let mut left = Vec::new();
    while let Some(fault) = scene.next(&mut left).await {
        let place = scene.place(proxies.len());
        let proxy = &proxies[place];
        let span =
            if scene.random.below(3) == 0 { TTL + scene.millis(100, 600) } else { scene.millis(100, 700) };
        let start = Time::now();
        let (made, lost, held) = (proxy.connections(), proxy.lost(), proxy.held());
        match fault {
            Fault::Reset => {
                for _ in 0..=scene.random.below(4) {
                    proxy.reset();
                    sleep(scene.millis(10, 60)).await;
                }
            }
            Fault::HalfOpen => {
                proxy.set_drops_requests(true);
                proxy.hold_requests(true);
                proxy.hold_replies(true);
                sleep(span).await;
                proxy.cut();
                proxy.set_drops_requests(false);
                proxy.hold_replies(false);
                proxy.hold_requests(false);
            }
            Fault::OneWay => {
                // One direction only: either no request arrives, or requests are executed and their
                // replies are lost with the connections.
                let blocks_replies = scene.random.below(2) == 0;
                let set = |blocked| {
                    if blocks_replies {
                        proxy.hold_replies(blocked);
                    } else {
                        proxy.set_drops_requests(blocked);
                        proxy.hold_requests(blocked);
                    }
                };
                set(true);
                sleep(span).await;
                proxy.cut();
                set(false);
            }
            Fault::Slow => {
                proxy.slow_down(Some(scene.millis(5, 60)));
                sleep(span).await;
                proxy.slow_down(None);
            }
            // Within a request, or within the reply to an executed request.
            Fault::Cut => {
                for _ in 0..=scene.random.below(4) {
                    let bytes = usize::try_from(scene.random.below(400)).unwrap();
                    if scene.random.below(2) == 0 {
                        proxy.cut_after(Some(bytes));
                    } else {
                        proxy.cut_replies_after(Some(bytes));
                    }
                    sleep(scene.millis(40, 160)).await;
                }
                proxy.cut_after(None);
                proxy.cut_replies_after(None);
            }
            // Late replies, on connections that stay open.
            Fault::RepliesHeld => {
                proxy.hold_replies(true);
                sleep(span).await;
                proxy.hold_replies(false);
            }
            // Late requests: the client may have abandoned them meanwhile.
            Fault::RequestsHeld => {
                proxy.hold_requests(true);
                sleep(span).await;
                proxy.hold_requests(false);
            }
            _ => {
                let number = usize::try_from(1 + scene.random.below(5)).unwrap();
                proxy.lose_replies(number);
                sleep(Duration::from_millis(200)).await;
                proxy.lose_replies(0);
            }
        }
        let (made, lost) = (proxy.connections() - made, proxy.lost() - lost);
        let held = proxy.held() - held;
        let effect = match fault {
            Fault::Cut | Fault::RepliesDropped => (lost > 0).then(|| format!("{lost} messages cut off")),
            Fault::Reset => (made > 0).then(|| format!("{made} new connections")),
            _ => (held > 0).then(|| format!("{held} bytes held for {span:?}, {made} new connections")),
        };
        scene.done(fault, Some(place), start, effect);
    }
}
